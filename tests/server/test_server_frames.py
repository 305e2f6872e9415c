"""Frames on their way out: straight to the connection where it waits for them, in order always."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.base.request import OutputDelta
from headrace.engine.clients.stream import Stream
from headrace.server.app import Application
from headrace.server.frames import Frames
from headrace.server.listen import http_server

CHAT = "/v1/chat/completions"
NAME = "told"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(delay=1e6)  # What is said comes from the tests.


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record whether each delta was sent past the task."""
    found: list[bool] = []
    own = Frames._straight

    def counted(self: Frames, *arguments: Any) -> bool:
        found.append(own(self, *arguments))
        return found[-1]

    monkeypatch.setattr(Frames, "_straight", counted)
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def answering(
    app: Application, engine: FakeEngine, path: str, **body: Any
) -> AsyncIterator[tuple[Stream, asyncio.StreamReader]]:
    """A server in this loop, and a connection that has asked it for a stream."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = http_server(app, None, None, backlog=8, last_words=1.0)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        port = listener.getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        data = json.dumps({**body, "stream": True}).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"x-request-id: {NAME}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await until(lambda: engine.streams)
        yield next(iter(engine.streams.values())), reader
        writer.close()
    finally:
        server.should_exit = True
        await serving
        listener.close()


def delta(stream: Stream, text: str, *, end: bool = False) -> OutputDelta:
    return OutputDelta(
        stream.request_id,
        0,
        text=text,
        token_ids=[7],
        prompt_tokens=3,
        finish_reason="length" if end else None,
    )


def waits(stream: Stream) -> bool:
    """Has its task sent all that it was given?"""
    return stream._waiter is not None and not stream._waiter.done()


async def tell(stream: Stream, words: list[str]) -> None:
    """Each of them when the task has sent what it was given and waits again; then the end."""
    for word in words:
        await until(lambda: waits(stream))
        stream.push(delta(stream, word))
    await until(lambda: waits(stream))
    stream.push(delta(stream, "!", end=True))


async def whole(reader: asyncio.StreamReader) -> bytes:
    """The body, without the marks of its chunks."""
    data = await reader.read()
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        body += rest[:length]
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
    return body


def events(body: bytes) -> list[dict[str, Any]]:
    parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part[:5] == b"data:"]
    assert parts[-1] == b"[DONE]"
    return [{**json.loads(part), "created": 0} for part in parts[:-1]]


CHATTED = {"messages": [{"role": "user", "content": "hi"}]}
ASKED = [
    (CHAT, {**CHATTED, "stream_options": {"include_usage": True}}),
    (CHAT, {**CHATTED, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("/v1/completions", {"prompt": "hi", "stream_options": {"include_usage": True}}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_what_goes_straight_is_what_a_task_would_send(
    app: Application,
    client: httpx.AsyncClient,
    engine: FakeEngine,
    straight: list[bool],
    path: str,
    body: dict[str, Any],
) -> None:
    words = ["a", "", "é\n", '"', "z"]
    async with answering(app, engine, path, **body) as (stream, reader):
        await tell(stream, words)
        sent = events(await whole(reader))
    assert straight == [True] * (len(words) - 1)  # The first wakes the task, the last ends it.

    engine.streams.clear()
    asked = asyncio.ensure_future(
        client.post(path, json={**body, "stream": True}, headers={"x-request-id": NAME})
    )
    await until(lambda: engine.streams)
    await tell(next(iter(engine.streams.values())), words)
    assert events((await asked).content) == sent
    assert len(straight) == len(words) - 1


async def test_a_client_that_reads_late_gets_all_of_it_in_order(
    app: Application, engine: FakeEngine, straight: list[bool]
) -> None:
    """While the connection takes nothing more, the deltas wait merged, and no later one passes them
    when it resumes."""
    async with answering(app, engine, CHAT, **CHATTED) as (stream, reader):
        # A reader that reads nothing: its buffer is full and then the system's.
        reader._limit = 1  # type: ignore[attr-defined]
        said = []
        while not said or straight.count(False) == 0:
            said.append(f"{len(said)} " * 20_000)
            await until(lambda: waits(stream))
            stream.push(delta(stream, said[-1]))
            assert len(said) < 1000
        for _ in range(5):
            said.append(f"{len(said)} ")
            stream.push(delta(stream, said[-1]))
        reader._limit = 1 << 26  # type: ignore[attr-defined]
        reading = asyncio.ensure_future(whole(reader))
        for _ in range(200):  # Some of these meet the moment at which it takes on.
            said.append(f"{len(said)} ")
            stream.push(delta(stream, said[-1]))
            await asyncio.sleep(0)
        stream.push(delta(stream, "", end=True))
        told = [
            choice["delta"].get("content", "")
            for event in events(await reading)
            for choice in event["choices"]
        ]
    assert "".join(told) == "".join(said)


async def test_a_frame_that_cannot_be_made_ends_its_own_answer_alone(
    app: Application, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answering(app, engine, CHAT, **CHATTED) as (stream, reader):
        await until(lambda: waits(stream))
        stream.push(delta(stream, "a"))
        await until(lambda: waits(stream))
        broken = delta(stream, "b")
        broken.text = 1j  # type: ignore[assignment]
        stream.push(broken)  # Raises nothing: others' deltas follow in the same call.
        data = await asyncio.wait_for(reader.read(), 120)
    assert b'"content":"a"' in data
    assert b"[DONE]" not in data
    assert stream.ended
