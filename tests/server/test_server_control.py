"""Sleep and wake, cache reset, profile: routes on the fake, memory and answers on the real one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from processes import Running, serving
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.server.app import create_app, create_operator_app
from headrace.server.keys import Key, hash_of, write_keys
from tiny import talker
from tiny.kept import Kept

ROUTES = ["/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile", "/stop_profile"]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def client_of(app: Any, secret: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://test", headers=headers
    )


async def test_only_an_operator_on_the_operators_port(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    write_keys(keys, [Key("u", hash_of("user")), Key("o", hash_of("boss"), role="operator")])
    app = create_app(FakeEngine(), ServerOptions(keys=str(keys)))  # type: ignore[arg-type]
    operator = create_operator_app(app)
    async with client_of(app, "boss") as public, client_of(operator, "user") as user:
        for path in ROUTES:
            assert (await public.post(path)).status_code == 404
            assert (await user.post(path)).status_code == 403
        assert (await public.get("/is_sleeping")).status_code == 404
    async with client_of(operator, "boss") as boss:
        assert (await boss.post("/reset_prefix_cache")).json() == {"blocks": 7}


async def test_asleep_it_refuses_and_says_when() -> None:
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    async with client_of(app) as client, client_of(create_operator_app(app)) as boss:
        assert (await boss.get("/is_sleeping")).json() == {"is_sleeping": False, "level": 0}
        reply = await boss.post("/sleep", params={"level": 1})
        assert reply.json() == {"is_sleeping": True, "level": 1, "kv_bytes": 4096}
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["code"] == "asleep"
        assert (await client.get("/v1/health/ready")).status_code == 503
        assert (await client.get("/v1/health/live")).status_code == 200
        assert (await boss.post("/wake_up")).json() == {"is_sleeping": False, "level": 0}
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        for wrong in ({"level": 0}, {"level": 3}, {"level": "x"}, {"mode": "keep"}, {"tags": "x"}):
            refused = await boss.post("/sleep", params=wrong)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == next(iter(wrong))
        assert (await boss.post("/stop_profile")).status_code == 400
        assert (await boss.post("/start_profile")).json() == {"recording": True}
        stopped = (await boss.post("/stop_profile")).json()
        assert stopped == {"path": "timeline.json", "steps": 3, "left_out": 2}


@pytest.mark.parametrize(
    ("level", "tags", "wakes"),
    [
        (1, [], True),
        (1, ["kv_cache"], True),
        (1, ["weights", "kv_cache"], True),
        (1, ["weights"], False),
        (1, ["scheduling"], False),
        (2, ["kv_cache", "weights"], True),
        (2, ["weights"], False),
        (2, ["kv_cache"], False),
        (0, ["weights"], True),
    ],
)
async def test_all_that_sleeps_is_woken_or_nothing(
    level: int, tags: list[str], wakes: bool
) -> None:
    """vLLM wakes weights and KV one after the other; a part alone serves nobody here."""
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    async with client_of(create_operator_app(app)) as boss:
        if level:
            await boss.post("/sleep", params={"level": level})
        reply = await boss.post("/wake_up", params={"tags": tags})
        assert reply.status_code == (200 if wakes else 400)
        if not wakes:
            assert reply.json()["error"]["param"].startswith("tags")
        assert (await boss.get("/is_sleeping")).json()["level"] == (0 if wakes else level)
        assert (await boss.post("/wake_up", params={"tag": "x"})).status_code == 400


def ask(server: Running, **more: Any) -> httpx.Response:
    text = "The headrace carries water to the turbine. " * 8
    body = {"prompt": text, "max_tokens": 8, "temperature": 0} | more
    return httpx.post(server.url + "/v1/completions", json=body, timeout=300)


def resident(server: Running) -> tuple[float, int]:
    """(MiB of all children in memory, how many there are)"""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sum(child.memory_info().rss for child in children) / 2**20, len(children)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["inline", "multiproc"])
def test_a_real_engine_gives_its_memory_back(kept: Kept, executor: str) -> None:
    model = kept(talker.make, hidden=256)
    with serving(
        model,
        "--operator-port 0 --max-sequences 256 --kv-memory 256MiB --kv-dtype float32",
        "--executor",
        executor,
    ) as server:
        boss = server.await_line(r"operator: (https?://\S+)").group(1)
        before = ask(server).json()
        cached = ask(server).json()
        assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert httpx.post(boss + "/reset_prefix_cache").json()["blocks"] > 0
        anew = ask(server).json()
        assert anew["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        # The system gives a pool its memory when it is used, and prefixes nobody asks for take
        # a quarter of it at most: use it by sequences that live at the same time.
        prompts = [[3 + (i * j + i) % 390 for j in range(256)] for i in range(1, 200)]
        ask(server, prompt=prompts, max_tokens=240, ignore_eos=True).raise_for_status()
        awake, children = resident(server)

        reply = httpx.post(boss + "/sleep?level=1").json()
        assert reply["kv_bytes"] > 200 * 2**20
        asleep, _ = resident(server)
        assert awake - asleep > 120, f"{awake:.0f} MiB awake, {asleep:.0f} asleep"
        assert ask(server).status_code == 503
        assert httpx.post(boss + "/reset_prefix_cache").status_code == 503
        httpx.post(boss + "/wake_up").raise_for_status()
        again = ask(server).json()
        assert again["choices"] == before["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

        httpx.post(boss + "/sleep?level=2").raise_for_status()
        _, left = resident(server)
        assert left < children
        assert ask(server).headers["retry-after"] == "5"
        httpx.post(boss + "/wake_up").raise_for_status()
        assert ask(server).json()["choices"] == before["choices"]
        restarts = re.findall(
            r"^headrace:engine_restarts_total\S* (\S+)", httpx.get(boss + "/metrics").text, re.M
        )
        assert not any(map(float, restarts)), "waking up is no restart"
        httpx.post(boss + "/sleep?level=2").raise_for_status()
        server.signal()
        assert server.wait() == 0, "a sleeping server ends as any other"


@pytest.mark.slow
def test_a_profile_and_a_sleep_under_load(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kept(talker.make, hidden=512)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    # An answer of a wide model on slow kernels still comes when the engine is put to sleep.
    flags = "--operator-port 0 --max-sequences 4 --kv-memory 8MiB --kernels ref"
    with serving(model, flags) as server:
        boss = server.await_line(r"operator: (https?://\S+)").group(1)
        started = httpx.post(boss + "/start_profile")
        if started.status_code == 400:
            assert "calibrate" in started.json()["error"]["message"]
        else:
            assert httpx.post(boss + "/start_profile").status_code == 400
            ask(server)
            made = httpx.post(boss + "/stop_profile").json()
            assert made["steps"] >= 8
            assert made["left_out"] == 0
            events = json.loads(Path(made["path"]).read_text())["traceEvents"]
            assert sum(event.get("tid") == 1 and event["ph"] == "X" for event in events) >= 8
            assert httpx.post(boss + "/stop_profile").status_code == 400
        with httpx.stream(
            "POST",
            server.url + "/v1/completions",
            json={"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True},
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            httpx.post(boss + "/sleep").raise_for_status()
            assert any('"aborted"' in line for line in lines)
        httpx.post(boss + "/wake_up").raise_for_status()
        assert ask(server).status_code == 200
