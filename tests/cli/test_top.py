"""`headrace top`: what it reads, what it shows, how it ends."""

from __future__ import annotations

import io
import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import aclosing, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from headrace.base.errors import InvalidRequest, Unauthorised
from headrace.cli import top, top_source, top_view
from headrace.cli.top_source import Reading, Scrape, difference, readings
from headrace.obs.life import RequestLife
from headrace.obs.metrics import EngineMetrics

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import fake_server, headrace, running

POINT = {
    "time": 0.0,
    "seconds": 1.0,
    "running": 3,
    "waiting": 1,
    "kv_usage": 0.5,
    "output_tokens_per_second": 42.0,
    "prompt_tokens_per_second": 7.0,
    "steps_per_second": 10.0,
    "batch": 3.0,
    "step_seconds": 0.02,
    "busy": 0.9,
    "roofline": 0.6,
    "prefix_lookups": 10,
    "prefix_hits": 4,
    "preemptions": 0,
    "time_to_first_token": {"p50": 0.1, "p90": 0.2, "p99": 0.3},
    "inter_token_latency": None,
}
REQUEST = {
    "id": "chatcmpl-1",
    "age": 1.5,
    "state": "decode",
    "prompt_tokens": 20,
    "cached_tokens": 16,
    "generated_tokens": 5,
    "max_tokens": 100,
    "choices": 1,
}


def _metrics(prefix: str, seconds: float) -> str:
    """Return the metrics of a server that made ten tokens a second."""
    lines = [
        f'{prefix}num_requests_running{{model_name="other"}} 2',
        f'{prefix}generation_tokens_total{{model_name="other"}} {seconds * 10}',
        f'{prefix}time_to_first_token_seconds_bucket{{le="0.1"}} 0',
        f'{prefix}time_to_first_token_seconds_bucket{{le="0.2"}} {seconds}',
        f'{prefix}time_to_first_token_seconds_bucket{{le="+Inf"}} {seconds}',
    ]
    return "\n".join(lines) + "\n"


def _client(handler: object) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://t/")  # type: ignore[arg-type]


async def test_our_stream_is_read() -> None:
    snapshot = {"server": {"model": "mine"}, "points": [], "requests": []}
    body = (
        f"event: snapshot\ndata: {json.dumps(snapshot)}\n\n: keep-alive\n\n"
        f"event: point\ndata: {json.dumps({'point': POINT, 'requests': [REQUEST]})}\n\n"
    )

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/stats/stream"
        return httpx.Response(200, text=body, headers={"content-type": "text/event-stream"})

    async with _client(handler) as client:
        (reading,) = [reading async for reading in readings(client, 1.0)]
    assert (reading.model, reading.running, reading.output_rate) == ("mine", 3, 42.0)
    assert reading.prefix_share == 0.4
    shown = _drawn(reading)
    for words in ("mine", "42.0/s", "1 waiting", "p99 300 ms", "60 %", "chatcmpl-1", "5/100"):
        assert words in shown, shown


@pytest.mark.parametrize("prefix", ["vllm:", ""])
async def test_any_server_with_the_known_names_is_read(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(top_source, "time", clock)

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path != "/metrics":
            return httpx.Response(404)
        clock.now += 1.0
        return httpx.Response(200, text=_metrics(prefix, clock.now))

    async with _client(handler) as client:
        found = readings(client, 0.0)
        reading = await anext(found)
        await found.aclose()
    assert (reading.model, reading.running, reading.waiting) == ("other", 2, None)
    assert reading.output_rate == pytest.approx(10)
    assert reading.first_token is not None
    assert reading.first_token["p50"] == pytest.approx(0.15)
    assert top_view.UNKNOWN in _drawn(reading)


def test_the_real_metrics_of_an_engine_are_understood() -> None:
    from prometheus_client import generate_latest

    metrics = EngineMetrics("m")
    before = Scrape(generate_latest(metrics.registry).decode(), 0.0)
    life = RequestLife(10.0, 20, max_tokens=8)
    metrics.tokens(life, 4, 10.5)
    metrics.between_tokens(0.02, 4)
    metrics.stats.kv_usage = 0.25
    after = Scrape(generate_latest(metrics.registry).decode(), 2.0)
    reading = difference(before, before, after)
    assert reading.output_rate == 2.0
    assert reading.prompt_rate == 10.0
    assert reading.kv_usage == 0.25
    assert reading.first_token is not None
    assert 0.25 <= reading.first_token["p50"] <= 0.5
    assert reading.token_gap is not None
    assert reading.roofline is None


def test_the_screen_says_that_others_use_the_machine() -> None:
    assert "others have 93 % of CPUs" in _drawn(Reading("statistics", roofline=0.04, others=0.93))
    assert "others have" not in _drawn(Reading("statistics", roofline=0.9, others=0.02))


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (Reading("statistics", running=0, waiting=0), "nothing runs"),
        (Reading("statistics", running=4, waiting=2, kv_usage=0.95), "KV memory: --kv-memory"),
        (Reading("statistics", running=4, waiting=2, kv_usage=0.3), "a place: --max-sequences"),
        (Reading("statistics", running=4, others=0.5), "other programs use 50 %"),
        (Reading("statistics", running=4, roofline=0.8), "near the hardware's limit"),
        (Reading("statistics", running=4, roofline=0.1), "headrace profile"),
        (Reading("metrics", running=4), "no limit is seen"),
    ],
    ids=["idle", "memory", "rows", "others", "near", "far", "unknown"],
)
def test_a_reading_says_what_would_help(reading: Reading, said: str) -> None:
    assert said in top_view.advice(reading)


async def test_a_key_that_is_missing_is_said() -> None:
    async with _client(lambda request: httpx.Response(401)) as client:
        with pytest.raises(Unauthorised, match="--key"):
            await anext(readings(client, 1.0))


async def test_what_is_no_metrics_page_is_said() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        status = 200 if request.url.path == "/metrics" else 404
        return httpx.Response(status, text="<html>{")

    async with _client(handler) as client:
        with pytest.raises(InvalidRequest, match="Prometheus"):
            await anext(readings(client, 1.0))


def test_the_screen_fits_and_survives_what_is_unknown() -> None:
    for height in (10, 24, 50):
        reading = Reading("statistics", requests=[REQUEST] * 40)
        assert len(_drawn(reading, height=height).splitlines()) <= max(height, 15)
    assert top_view.bars([None, 0.0, 1.0, 2.0], 10) == " ▁▅█"
    assert top_view.bars([1.0] * 9, 3, top=1.0) == "███"


def test_once_against_a_real_server_and_none() -> None:
    with running(fake_server()) as server:
        found = subprocess.run(
            headrace("top", server.url, "--once", "--json"),
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        reading = json.loads(found.stdout)
        assert reading["source"] == "statistics"
        assert reading["model"] == "fake"
        assert found.stderr == ""


@pytest.mark.parametrize(
    "words",
    [("--once",), (), ("--json",), ("--url",)],
    ids=["once", "piped", "json", "by --url"],
)
def test_without_a_server_it_says_so_and_ends(words: tuple[str, ...]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # Nobody listens there, and nobody else can.
        address = f"127.0.0.1:{free.getsockname()[1]}"
        gone = subprocess.run(
            headrace("top", *words, address),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert gone.returncode == 69
    assert gone.stderr.startswith(f"error: cannot reach http://{address}")
    assert "headrace serve" in gone.stderr


async def test_a_server_that_answered_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that only said that it is not ready yet has answered, too."""
    monkeypatch.setattr(top, "AGAIN_SECONDS", 0.0)
    replies = iter([httpx.Response(503), httpx.ConnectError("gone")])

    def handler(request: httpx.Request) -> httpx.Response:
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async with (
        _client(handler) as client,
        aclosing(top._lasting(client, 1.0, patient=True)) as found,
    ):
        assert "503" in str(await anext(found))
        assert "cannot reach" in str(await anext(found))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_in_a_terminal_it_draws_and_q_quits() -> None:
    import pty

    with running(fake_server()) as server:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            headrace("top", server.url),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
        )
        os.close(theirs)
        try:
            seen = b""
            end = time.monotonic() + 120
            while b"generated" not in seen or b"fake" not in seen:
                assert time.monotonic() < end, seen
                seen += os.read(ours, 65536)
            os.write(ours, b"q")
            # A screen that nobody reads would hold it.
            while process.poll() is None:
                assert time.monotonic() < end
                if select.select([ours], [], [], 0.1)[0]:
                    with suppress(OSError):  # It has closed its side.
                        os.read(ours, 65536)
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def _drawn(reading: Reading, *, height: int = 40) -> str:
    screen = top_view.Screen("http://t")
    screen.add(reading)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen.draw(height, 120))
    return console.export_text()
