"""The service while its parts break: every stream ends in a typed way, and service comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from processes import Running, api_pid, ended, fake_server, kill, running, serving

from ports import two_ports
from tiny import talker
from tiny.kept import Kept

ENGINE_TESTS = Path(__file__).parent.parent / "engine"
CODE = """
import os, sys
sys.path.insert(0, {tests!r})
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
from pathlib import Path
from engine_fakes import OPTIONS
from headrace.base.config import ServerOptions
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.supervision import Supervision
from headrace.server import service
from headrace.server.run import ServerProcess

# A stream begins with its first event, however long a busy machine takes to bury an engine.
service.KEEP_ALIVE = 365 * 86_400.0

async def start():
    patience = Supervision(hang={hang}, start=600.0, dumps=Path({folder!r}) / "flight")
    own = OPTIONS | {{"model": {model!r}, "max_context": 512}}
    return await AsyncEngine.start(worker={worker!r}, supervision=patience, **own)

options = ServerOptions(port={port}, drain_seconds=600)
sys.exit(ServerProcess(start, options, lambda line: print(line, flush=True)).run())
"""
HANG, CRASH, RAISE, SLOW = 290, 291, 292, 293
"""Tokens in a prompt that make the fake worker of tests/engine misbehave."""
pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"


def command(
    folder: Path, *, port: int = 0, worker: str = "engine_fakes:load", hang: float = 600.0
) -> list[str]:
    model = str(talker.make(folder / "tiny"))
    code = CODE.format(
        tests=str(ENGINE_TESTS),
        folder=str(folder),
        model=model,
        port=port,
        worker=worker,
        hang=hang,
    )
    return [sys.executable, "-c", code]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(command(tmp_path)) as server:
        yield server


@pytest.fixture
def leisurely(tmp_path: Path) -> Iterator[Running]:
    """Its answers take a minute, until its engine is killed; the next comes with the file `go`."""
    with running(command(tmp_path, worker="engine_fakes:load_at_leisure")) as server:
        yield server


def ask(tokens: int, *prompt: int, stream: bool = True) -> dict[str, Any]:
    return {"prompt": [65, *prompt], "max_tokens": tokens, "temperature": 0, "stream": stream}


def engine_of(server: Running) -> int:
    (child,) = psutil.Process(server.process.pid).children()
    return child.pid


def until(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def serves_again(server: Running) -> None:
    until(lambda: httpx.get(server.url + "/v1/health/ready").status_code == 200)
    reply = httpx.post(server.url + COMPLETIONS, json=ask(5, stream=False))
    assert reply.json()["usage"]["completion_tokens"] == 5
    names = ("vllm:kv_cache_usage_perc{", "vllm:num_requests_running{")
    until(lambda: not any(counted(server, name) for name in names))
    until(lambda: counted(server, "headrace_http_requests_in_work") == 0)


async def streams(server: Running, count: int, tokens: int, then: Any) -> list[tuple[int, str]]:
    """(status, text) of so many streams; `then` is called when each has begun."""
    begun = asyncio.Semaphore(0)

    async def one(client: httpx.AsyncClient, place: int) -> tuple[int, str]:
        text = ""
        body = ask(tokens, SLOW, place)
        async with client.stream("POST", server.url + COMPLETIONS, json=body) as reply:
            async for part in reply.aiter_text():
                if not text:
                    begun.release()
                text += part
            return reply.status_code, text

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits) as client:
        tasks = [asyncio.create_task(one(client, place)) for place in range(count)]
        for _ in range(count):
            await asyncio.wait_for(begun.acquire(), 120)
        then()
        return await asyncio.gather(*tasks)


def last_error(text: str) -> dict[str, Any]:
    events = text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    error: dict[str, Any] = json.loads(events[-2].removeprefix("data: "))["error"]
    return error


async def test_kill_under_64_streams(leisurely: Running, tmp_path: Path) -> None:
    server = leisurely
    engine = engine_of(server)
    found = await streams(server, 64, 400, lambda: os.kill(engine, signal.SIGKILL))
    for status, text in found:
        assert status == 200
        error = last_error(text)
        assert error["code"] == "engine_dead"
        assert error["type"] == "overloaded_error"
    refused = httpx.post(server.url + COMPLETIONS, json=ask(5))
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    ready = httpx.get(server.url + "/v1/health/ready")
    assert ready.status_code == 503
    assert int(ready.headers["retry-after"]) >= 1
    assert httpx.get(server.url + "/v1/health/live").status_code == 200
    (tmp_path / "tiny" / "go").touch()
    serves_again(server)
    assert engine_of(server) != engine
    text = httpx.get(server.url + "/metrics").text
    deaths = next(x for x in text.splitlines() if "failures_total" in x and 'kind="death"' in x)
    assert deaths.endswith(" 1.0")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("token", "code"), [(HANG, "engine_dead"), (CRASH, "engine_dead")])
def test_a_step_that_hangs_or_crashes(tmp_path: Path, token: int, code: str, stream: bool) -> None:
    """Nothing was sent yet, so the answer has its own status."""
    body = ask(5, token, stream=stream)
    with running(command(tmp_path, hang=5.0)) as server:
        reply = httpx.post(server.url + COMPLETIONS, json=body)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == code
        assert int(reply.headers["retry-after"]) >= 1
        serves_again(server)


def counted(server: Running, name: str) -> float:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_a_killed_engine_costs_no_background_response(leisurely: Running, tmp_path: Path) -> None:
    server = leisurely
    (tmp_path / "tiny" / "go").touch()
    body = {"input": "a", "max_output_tokens": 150, "temperature": 0, "background": True}
    name = httpx.post(server.url + "/v1/responses", json=body).json()["id"]
    until(lambda: counted(server, "vllm:generation_tokens_total") >= 10)
    os.kill(engine_of(server), signal.SIGKILL)
    path = f"{server.url}/v1/responses/{name}"
    until(lambda: httpx.get(path).json()["status"] != "in_progress")
    response = httpx.get(path).json()
    assert response["status"] == "incomplete", response["error"]
    assert response["usage"]["output_tokens"] == 150
    assert counted(server, "headrace:requests_retried_total") == 1


def test_a_step_that_fails(server: Running) -> None:
    reply = httpx.post(server.url + COMPLETIONS, json=ask(5, RAISE))
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_fault"
    serves_again(server)


async def test_sigterm_under_load_finishes_everything(tmp_path: Path) -> None:
    with running(command(tmp_path)) as server:
        engine = engine_of(server)
        found = await streams(server, 64, 60, server.signal)
        assert server.wait() == 0
        for status, text in found:
            assert status == 200
            assert '"finish_reason":"length"' in text
            assert text.endswith("data: [DONE]\n\n")
        until(lambda: ended(engine))


async def test_ctrl_c_twice_under_load(tmp_path: Path) -> None:
    def twice() -> None:
        server.signal(signal.SIGINT)
        server.await_line("finishing")
        server.signal(signal.SIGINT)

    with running(command(tmp_path, worker="engine_fakes:load_at_leisure")) as server:
        engine = engine_of(server)
        found = await streams(server, 32, 450, twice)
        assert server.wait() == 130
        for _, text in found:
            assert last_error(text)["code"] == "aborted"
        until(lambda: ended(engine))


def test_kill_of_the_api_process_takes_the_engine_with_it(tmp_path: Path) -> None:
    port = two_ports()
    with running(command(tmp_path, port=port)) as server:
        engine = engine_of(server)
        server.signal(signal.SIGKILL)
        server.wait()
        until(lambda: ended(engine))
    with running(command(tmp_path, port=port)) as server:
        serves_again(server)


def test_a_full_disk_for_log_and_store(tmp_path: Path) -> None:
    """Files may not grow beyond 64 KiB: the write fails, as on a full disk. Answers still come."""
    code = fake_server(options=f"port=0, store={str(tmp_path / 'store.db')!r}, log_format='json'")
    code[-1] = code[-1].replace(
        "options =",
        "import resource\n"
        "from headrace.obs.logs import configure_logs\n"
        "configure_logs('debug', 'json')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "options =",
    )
    log = tmp_path / "log"
    _serve_to_a_full_disk(code, log)
    assert log.stat().st_size <= 65536


def test_a_full_file_system_for_log_and_store(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        code = fake_server(options=f"port=0, store={str(disk / 'store.db')!r}, log_format='json'")
        code[-1] = code[-1].replace(
            "options =",
            "from headrace.obs.logs import configure_logs\n"
            "configure_logs('debug', 'json')\noptions =",
        )
        _serve_to_a_full_disk(code, disk / "log")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _serve_to_a_full_disk(code: list[str], log: Path) -> None:
    with log.open("wb") as file, running(code, log=file) as server:
        statuses = []
        ids = []
        for _ in range(60):
            reply = httpx.post(
                server.url + "/v1/responses",
                json={"input": "x" * 400, "max_output_tokens": 100},
            )
            statuses.append(reply.status_code)
            ids.append(reply.json()["id"])
        assert set(statuses) == {200}
        gone = httpx.get(f"{server.url}/v1/responses/{ids[-1]}")
        assert gone.status_code == 404, "nothing was full: the test tests nothing"
        assert httpx.get(f"{server.url}/v1/responses/{ids[0]}").status_code == 200
        reply = httpx.delete(f"{server.url}/v1/responses/{ids[0]}")
        assert reply.status_code in (200, 503)
        assert httpx.get(server.url + "/health").status_code == 200
        assert 'status="500"' not in httpx.get(server.url + "/metrics").text


def served(url: str) -> int:
    body = {"model": "m", "prompt": "a", "max_tokens": 2, "temperature": 0}
    body["model"] = httpx.get(url + "/v1/models").json()["data"][0]["id"]
    return httpx.post(url + "/v1/completions", json=body).status_code


def test_the_port_outlives_the_api_process(kept: Kept) -> None:
    model = kept(talker.make)
    with serving(model, "--kernels ref") as server:
        first = api_pid(server)
        (engine,) = psutil.Process(first).children()
        for death in range(2):
            kill(api_pid(server))
            # Never refused: what comes meanwhile waits in the queue of the port.
            assert httpx.get(server.url + "/v1/health/live").status_code == 200
            server.lines.remove(next(line for line in server.lines if "ready: " in line))
            server.await_line(r"ready: .* on http")
            assert served(server.url) == 200
            assert any("API process was ended by SIGKILL" in line for line in server.lines), death
        assert api_pid(server) != first
        until(lambda: ended(engine.pid))
        server.signal()
        assert server.wait() == 0


def test_the_api_process_leaves_with_its_parent(kept: Kept) -> None:
    model = kept(talker.make)
    with serving(model, "--kernels ref") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) == 2
        server.signal(signal.SIGKILL)
        until(lambda: all(ended(one.pid) for one in family))


def test_ctrl_c_is_passed_on_once(kept: Kept) -> None:
    model = kept(talker.make)
    with serving(model, "--kernels ref") as server:
        assert os.getpgid(api_pid(server)) != os.getpgid(server.process.pid)
        server.signal(signal.SIGINT)
        assert server.wait() in (0, 130)
