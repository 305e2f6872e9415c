"""The event loop never works for one client: what would hold it is bounded or done elsewhere, and
what holds it all the same is seen."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import fake_server, memory, running
from pydantic import TypeAdapter
from server_fake import FakeEngine
from starlette.requests import ClientDisconnect

from headrace.base.config import ServerOptions
from headrace.base.errors import Overloaded
from headrace.obs import loopwatch
from headrace.obs.loopwatch import LoopWatch
from headrace.obs.threads import THREADS
from headrace.server.app import create_app
from headrace.server.body import BodiesInFlight
from headrace.server.caller import BODY_SIZE, CALLER, RECEIVE, Caller
from headrace.server.hands import LARGE, Hands
from headrace.text import ChatTemplate

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
HELLO = json.dumps(ASK["messages"]).encode()


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")


# What is hostile is bounded before it is counted


def many(item: bytes, count: int) -> bytes:
    return b",".join([item] * count)


HEAVY = {
    "lists where nothing is read": b'{"messages":%b,"metadata":[%b]}' % (HELLO, many(b"[]", 10**6)),
    "keys": b'{"messages":%b,"metadata":{%b}}'
    % (HELLO, b",".join(b'"%d":1' % i for i in range(10**5))),
    "variables": b'{"messages":%b,"chat_template_kwargs":{"a":[%b]}}' % (HELLO, many(b"[]", 10**6)),
    "unknown fields": b'{"messages":%b,%b}'
    % (HELLO, b",".join(b'"k%d":1' % i for i in range(10**5))),
    "messages": b'{"messages":[%b]}' % many(b'{"role":"user","content":"x"}', 10**5),
    "numbers": b'{"messages":%b,"stop_token_ids":[%b]}' % (HELLO, many(b"1", 10**6)),
}


@pytest.mark.parametrize("name", HEAVY)
async def test_a_heavy_body_is_refused_before_it_is_built(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr("headrace.server.entry.parse", never)
    async with client_of(create_app(FakeEngine(), ServerOptions())) as client:  # type: ignore[arg-type]
        headers = {"content-type": "application/json"}
        reply = await client.post(CHAT, content=HEAVY[name], headers=headers)
    assert reply.status_code == 413
    assert "the body has more than" in reply.json()["error"]["message"]


async def test_what_people_send_is_not_heavy() -> None:
    """Long prose full of commas and brackets, and a conversation of three thousand turns."""
    prose = 'Well, [he] said: {"so", what?} \\ ' * 20_000
    turns = [{"role": "user", "content": "a, b"}] * 3000
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    async with client_of(app) as client:
        for messages in ([{"role": "user", "content": prose}], turns):
            reply = await client.post(CHAT, json=ASK | {"messages": messages})
            assert reply.status_code == 400, reply.text
            assert "context" in reply.json()["error"]["message"]


async def test_the_text_of_all_requests_is_bounded(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    app = create_app(FakeEngine(gate=gate), ServerOptions())  # type: ignore[arg-type]
    app.state.service.bodies = BodiesInFlight(1000)
    body = ASK | {"max_tokens": 30, "user": "x" * 500}
    async with client_of(app) as client:
        asked = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(3)]
        while sum(task.done() for task in asked) < 2:
            await asyncio.sleep(0.01)
        gate.touch()
        replies = await asyncio.gather(*asked)
        assert sorted(reply.status_code for reply in replies) == [200, 503, 503]
        assert all(r.headers["retry-after"] for r in replies if r.status_code == 503)
        assert app.state.service.bodies.held == 0
        assert (await client.post(CHAT, json=body)).status_code == 200
    bodies = BodiesInFlight(1000)
    CALLER.set(Caller("alice"))
    with pytest.raises(Overloaded):
        bodies.take({}, 501)  # A key has half of it at most.
    bodies.take(alices := {}, 500)
    CALLER.set(Caller("bob"))
    bodies.take({}, 500)
    bodies.give(alices)
    assert bodies.held == 500


def test_four_hostile_bodies_at_once_do_not_fill_memory() -> None:
    """These ended a server in 1,400 MiB; it answers them with 413 now, and others meanwhile."""
    body = HEAVY["lists where nothing is read"]
    with running(fake_server(options=f"port=0, max_body={32 * 2**20}")) as server:
        before = memory(server)
        statuses: list[int] = []

        def send() -> None:
            headers = {"content-type": "application/json"}
            reply = httpx.post(server.url + CHAT, content=body, headers=headers, timeout=120)
            statuses.append(reply.status_code)

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [413] * 4
        assert memory(server) - before < 4 * 4 * len(body)
        assert httpx.post(server.url + CHAT, json=ASK).status_code == 200


# Off the loop, in turn


async def test_hands_take_turns_and_drop_what_nobody_waits_for() -> None:
    hands = Hands(1)
    go, order = threading.Event(), []

    def work(name: str) -> str:
        go.wait(120)
        order.append(name)
        return name

    async def ask(owner: str, name: str) -> str:
        CALLER.set(Caller(owner))
        return await hands.run(work, name)

    tasks = [asyncio.create_task(ask("alice", f"a{i}")) for i in range(5)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(ask("bob", "b")))
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a0", "a1", "b", "a3", "a4"]
    assert hands.waiting == 0

    def fails() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await hands.run(fails)
    assert await hands.run(work, "again") == "again"
    hands.close()


async def test_what_is_small_waits_for_nothing_large() -> None:
    """Eight huge schemas of the same owner took every thread."""
    hands = Hands(2)
    go, order = threading.Event(), []

    def work(name: str) -> None:
        if name != "small":
            go.wait(120)
        order.append(name)

    async def ask(name: str, size: int) -> None:
        BODY_SIZE.set(size)
        await hands.run(work, name)

    large = [asyncio.create_task(ask(f"large {i}", LARGE)) for i in range(8)]
    await asyncio.sleep(0)
    await asyncio.wait_for(ask("small", 100), 120)
    assert order == ["small"]
    assert hands.waiting == 7
    go.set()
    await asyncio.gather(*large)
    assert order == ["small", *(f"large {i}" for i in range(8))]
    hands.close()


async def test_large_work_of_a_small_body_leaves_a_thread_free() -> None:
    hands, go = Hands(3), threading.Event()
    BODY_SIZE.set(100)
    large = [asyncio.create_task(hands.run(go.wait, 120, large=True)) for _ in range(8)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(hands.run(len, "small"), 120) == 5
    assert hands.waiting == 7
    go.set()
    await asyncio.gather(*large)
    hands.close()


async def test_what_a_client_waits_for_no_more_is_not_begun() -> None:
    hands = Hands(1)
    go, begun = threading.Event(), []
    first = asyncio.create_task(hands.run(go.wait, 120))
    await asyncio.sleep(0)
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def ask() -> None:
        RECEIVE.set(receive)
        await hands.run(begun.append, 1)

    second = asyncio.create_task(ask())
    await asyncio.sleep(0)
    left.set()
    with pytest.raises(ClientDisconnect):
        await second
    go.set()
    assert await first
    await hands.run(int)
    assert begun == []
    hands.close()


async def test_work_is_stopped_when_nobody_waits_for_it() -> None:
    """Its end is waited for, so that what it uses may be let go of; what waits is not begun."""
    hands = Hands(1)
    stop, ended, begun = threading.Event(), [], threading.Event()

    def work() -> None:
        begun.set()
        assert stop.wait(120)
        ended.append(1)

    async def ask() -> None:
        await hands.stoppable(work, stop.set, large=False)

    first, second = asyncio.create_task(ask()), asyncio.create_task(ask())
    assert await asyncio.to_thread(begun.wait, 120)
    second.cancel()
    await asyncio.wait({second})
    assert not stop.is_set()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert ended == [1]
    assert await hands.run(int) == 0
    assert ended == [1]
    hands.close()


async def test_hands_are_not_for_all_the_world() -> None:
    hands = Hands(1, most_of_one=2)
    go = threading.Event()
    tasks = [asyncio.create_task(hands.run(go.wait, 120)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await hands.run(go.wait, 120)
    go.set()
    await asyncio.gather(*tasks)
    hands.close()


def test_a_template_that_hangs_in_c_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    code = fake_server()
    code[-1] = code[-1].replace(
        "async def start():\n    return FakeEngine(",
        "import headrace.text.renderer as renderer\n"
        "renderer.HARD_SECONDS = 1.0\n"
        "from headrace.text import ChatTemplate\n"
        "SOURCE = \"{{% if messages[0].content == 'bad' %}}{{{{ 15|round(-10**8, 'floor') }}}}\"\n"
        'SOURCE += "{{% endif %}}{{{{ messages[0].content }}}}"\n'
        "class Engine(FakeEngine):\n"
        "    def __init__(self, **more):\n"
        "        super().__init__(**more)\n"
        "        self.template = ChatTemplate(SOURCE)\n"
        "async def start():\n    return Engine(".replace("{{", "{").replace("}}", "}"),
    )
    with running(code) as server:
        bad = ASK | {"messages": [{"role": "user", "content": "bad"}]}
        replies: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: replies.append(httpx.post(server.url + CHAT, json=bad, timeout=120))
        )
        thread.start()
        time.sleep(0.5)
        assert httpx.get(server.url + "/health", timeout=120).status_code == 200
        thread.join()
        assert replies[0].status_code == 413
        assert "takes longer than" in replies[0].json()["error"]["message"]
        assert httpx.post(server.url + CHAT, json=ASK, timeout=120).status_code == 200


async def test_a_large_conversation_is_written_out_in_a_process() -> None:
    engine = FakeEngine()
    engine.template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    async with client_of(create_app(engine, ServerOptions())) as client:  # type: ignore[arg-type]
        messages = [{"role": "user", "content": str(i % 10)} for i in range(400)]
        reply = await client.post(CHAT, json=ASK | {"messages": messages})
        assert reply.status_code == 200
        assert bytes(engine.seen[-1][0]).decode() == "0123456789" * 40


# Seen


def hold_the_loop(watch: LoopWatch, seconds: float) -> None:
    """For so long, and until the thread that watches has had its turn."""
    begin = time.monotonic()
    while time.monotonic() < begin + seconds or (
        "hold_the_loop" not in watch._seen[1] and time.monotonic() < begin + 60
    ):
        time.sleep(0.01)


async def test_a_thread_that_ends_makes_unready() -> None:
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    well = threading.Event()

    def work() -> None:
        if not well.is_set():
            raise ValueError("no more events")

    async with client_of(app) as client:
        thread = THREADS.keep("sick", work)
        while not THREADS.down:
            await asyncio.sleep(0)
        reply = await client.get("/health")
        assert reply.status_code == 503
        assert "sick does not run: ValueError: no more events" in reply.json()["message"]
        well.set()
        await asyncio.to_thread(thread.join)
        assert (await client.get("/health")).status_code == 200
        text = (await client.get("/metrics")).text
        assert 'headrace_thread_failures_total{thread="sick"} ' in text


async def test_a_hold_is_seen_with_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever else a busy machine does to this loop is shorter, or is a dump beside this one.
    monkeypatch.setattr(loopwatch, "NOTED", 1.0)
    monkeypatch.setattr(loopwatch, "REMEMBERED", 1e9)
    monkeypatch.setattr(loopwatch, "DUMP_EVERY", 0.0)
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    watch = app.state.service.loop = LoopWatch(dumps=tmp_path, on_beat=app.state.meter.late)
    async with client_of(app) as client:
        # The first one builds the application.
        assert (await client.get("/health")).status_code == 200
        watch.start()
        await asyncio.sleep(0.2)
        hold_the_loop(watch, 1.3)
        while watch.longest < 1:  # Until the beat that was held.
            await asyncio.sleep(0.01)
        reply = await client.get("/health")
        assert reply.status_code == 503
        assert "the event loop was held for" in reply.json()["message"]
        assert (await client.get("/v1/health/live")).status_code == 200
        assert "hold_the_loop" in watch.stack
        text = (await client.get("/metrics")).text
        assert 'headrace_event_loop_lag_seconds_bucket{le="0.25"}' in text
        assert watch.longest > 1
        monkeypatch.setattr(loopwatch, "REMEMBERED", -1.0)
        assert (await client.get("/health")).status_code == 200
    watch.stop()
    for _ in range(2400):
        records = []
        for path in tmp_path.glob("flight-*.json"):
            with suppress(ValueError):  # It is being written.
                records.append(json.loads(path.read_text()))
        held = [one for one in records if any("hold_the_loop" in x for x in one["stacks"])]
        if held:
            break
        await asyncio.sleep(0.05)
    assert held[0]["kind"] == "loop"


async def test_the_first_client_of_an_interface_finds_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    made: list[Any] = []
    init = TypeAdapter.__init__

    def counted(self: Any, type: Any, **more: Any) -> None:
        made.append(type)
        init(self, type, **more)

    monkeypatch.setattr(TypeAdapter, "__init__", counted)
    async with client_of(app) as client:
        for path in ("/api/version", "/v1/models", "/props"):
            await client.get(path)
    assert made == []
