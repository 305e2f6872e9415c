"""A live session: the socket that it tells its words to, and the samples that it holds."""

from __future__ import annotations

import asyncio
import base64
import json
import socket as sockets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hearing_fake import FakeHearing

from headrace.base.config import ServerOptions
from headrace.base.shares import Shares
from headrace.server.app import Application, create_app
from headrace.server.body import BodiesInFlight
from headrace.server.hearing.live import LiveSession
from headrace.server.hearing.pcm import Intake
from headrace.server.listen import http_server
from headrace.server.service import Service
from headrace.server.socket import Socket

pytest.importorskip("soxr", reason="needs the extra audio")
websockets = pytest.importorskip("websockets", reason="needs the extra audio")
PCM = {"type": "audio/pcm", "rate": 16_000}


class Talk:
    """A session, its client's events and what it is told."""

    def __init__(self, ears: FakeHearing, *, bytes: int = 2**28) -> None:
        self.ears = ears
        self.service = Service(ServerOptions(served_name="ears"))
        self.service.bodies = BodiesInFlight(bytes)
        self.scope: dict[str, Any] = {}
        self.socket = Socket([])
        self.told: list[dict[str, Any]] = []
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._news = asyncio.Event()
        self.session = LiveSession(self.service, ears, None, self._told, self.scope, beta=False)
        self._run = asyncio.create_task(self.session.run(self._events.get, self.socket))

    async def _told(self, message: Any) -> None:
        self.told.append(json.loads(message["body"]))
        self._news.set()

    def say(self, text: str) -> None:
        self._events.put_nowait({"type": "websocket.receive", "text": text})

    def send(self, kind: str, **fields: Any) -> None:
        self.say(json.dumps({"type": kind, **fields}))

    def append(self, data: bytes) -> None:
        self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    def update(self, **fields: Any) -> None:
        self.send("session.update", session={"audio": {"input": fields}})

    async def until(self, kind: str) -> dict[str, Any]:
        """Take what was told up to an event whose type ends so."""
        while True:
            while self.told:
                event = self.told.pop(0)
                if event["type"].endswith(kind):
                    return event
            self._news.clear()
            async with asyncio.timeout(120):
                await self._news.wait()

    async def leave(self) -> None:
        self._events.put_nowait({"type": "http.disconnect"})
        await self._run
        self.service.leave(self.scope)
        await self.ears.settled()


@pytest.fixture
def ears(tmp_path: Path) -> FakeHearing:
    return FakeHearing(tmp_path)


def spoken(seconds: float) -> bytes:
    """A second of noise, then silence: one turn in each second and a half."""
    t = np.arange(int(16_000 * seconds))
    loud = np.random.default_rng(1).normal(0, 8_000, len(t)) * (t % 24_000 < 16_000)
    return np.clip(loud, -32_768, 32_767).astype("<i2").tobytes()


async def test_nothing_is_done_for_a_client_that_has_gone(ears: FakeHearing) -> None:
    """Events that it sent before it left wait in the queue: none of them is answered."""
    socket, told = Socket([]), 0

    async def send(message: Any) -> None:
        nonlocal told
        told += 1
        socket.lost = told > 3  # As `Sockets` has it, once the connection says so.

    events: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(200):
        events.put_nowait({"type": "websocket.receive", "text": "no event"})
    events.put_nowait({"type": "http.disconnect"})
    session = LiveSession(Service(ServerOptions()), ears, None, send, {}, beta=False)
    await session.run(events.get, socket)
    assert told == 4
    assert events.qsize() > 190


async def test_half_a_surrogate_is_one_error_and_the_session_goes_on(ears: FakeHearing) -> None:
    talk = Talk(ears)
    half = '"\\ud800"'
    for text in (
        f'{{"type": "x", "event_id": {half}}}',
        f'{{"type": {half}}}',
        f'{{"type": "session.update", "session": {{{half}: 1}}}}',
        f'{{"type": "input_audio_buffer.append", "audio": {half}}}',
        "[" * 100_000,
        "9" * 5_000,
        '{"type": "x", "a": NaN}',
    ):
        talk.say(text)
        assert (await talk.until("error"))["error"]["code"] == "invalid_json"
    talk.send("y", event_id="mine")
    assert (await talk.until("error"))["error"]["event_id"] == "mine"
    await talk.leave()


async def test_an_append_may_end_within_a_sample(ears: FakeHearing) -> None:
    talk, data = Talk(ears), spoken(1.0)
    talk.update(turn_detection=None, format=PCM)
    for at in range(0, len(data), 777):
        talk.append(data[at : at + 777])
    talk.send("input_audio_buffer.commit")
    await talk.until("completed")
    wanted = np.frombuffer(data, "<i2").astype(np.float32) / 32_768
    assert np.array_equal(ears.heard[-1], wanted)
    talk.append(data[:777])
    talk.send("input_audio_buffer.clear")  # The next byte begins a sample.
    talk.append(data)
    talk.send("input_audio_buffer.commit")
    await talk.until("completed")
    assert np.array_equal(ears.heard[-1], wanted)
    await talk.leave()


async def test_what_was_appended_before_is_looked_at_when_turns_are_wanted(
    ears: FakeHearing,
) -> None:
    talk = Talk(ears)
    talk.update(turn_detection=None, format=PCM)
    talk.append(spoken(3.0))
    talk.update(turn_detection={"type": "server_vad", "silence_duration_ms": 300})
    for start in (0, 1_500):
        begun = await talk.until("speech_started")
        assert abs(begun["audio_start_ms"] - start) < 200
        ended = await talk.until("speech_stopped")
        assert abs(ended["audio_end_ms"] - start - 1_300) < 200
        await talk.until("committed")
    for _ in range(2):
        await talk.until("completed")
    assert all(0.8 < asked.count / 16_000 < 1.8 for asked in ears.asked if not asked.options.live)
    await talk.leave()
    assert (talk.service.bodies.held, ears.samples, ears.payloads) == (0, 0, [])


async def test_nothing_is_lost_between_turns_that_are_cut(ears: FakeHearing) -> None:
    """Somebody who does not pause is cut after 28 s, within an append and within a frame."""
    talk = Talk(ears)
    t = np.arange(16_000 * 40)
    noise = np.random.default_rng(2).normal(0, 8_000, len(t)) * (t % 8_000 < 6_000)
    data = np.clip(noise, -32_768, 32_767).astype("<i2").tobytes()
    talk.update(format=PCM)
    for at in range(0, len(data), 100_002):
        talk.append(data[at : at + 100_002])
    await talk.until("completed")
    talk.send("input_audio_buffer.commit")
    await talk.until("completed")
    whole = [
        each for asked, each in zip(ears.asked, ears.heard, strict=True) if not asked.options.live
    ]
    assert np.array_equal(
        np.concatenate(whole), np.frombuffer(data, "<i2").astype(np.float32) / 32_768
    )
    await talk.leave()


async def test_samples_count_as_bytes_of_bodies(ears: FakeHearing) -> None:
    """Held as 16 bits at 16 kHz, refused by an event above the total, let go of when heard."""
    talk, ears.answers = Talk(ears, bytes=200_000), False
    talk.update(turn_detection=None, format={"type": "audio/pcmu", "rate": 8_000})
    second = bytes(range(256)) * 31 + bytes(64)
    for _ in range(5):
        talk.append(second)
    talk.send("none")
    await talk.until("error")
    assert 155_000 < talk.service.bodies.held <= 160_000
    talk.append(second * 2)
    refused = (await talk.until("error"))["error"]
    assert (refused["type"], refused["code"]) == ("overloaded_error", "overloaded")
    talk.send("input_audio_buffer.commit")
    await talk.until("committed")
    talk.append(second * 2)
    assert (await talk.until("error"))["error"]["code"] == "overloaded"
    while not (turns := [asked for asked in ears.asked if not asked.options.live]):
        await asyncio.sleep(0.001)
    ears.answers = True
    ears.end(turns[0])
    await talk.until("completed")
    talk.append(second * 2)
    talk.send("input_audio_buffer.commit")
    await talk.until("completed")
    await talk.leave()
    assert (talk.service.bodies.held, ears.samples) == (0, 0)


async def test_a_session_that_ends_gives_back_what_it_held(ears: FakeHearing) -> None:
    talk, ears.answers = Talk(ears), False
    talk.update(turn_detection=None, format=PCM)
    for _ in range(3):
        talk.append(spoken(2.0))
        talk.send("input_audio_buffer.commit")
        await talk.until("committed")
    talk.append(spoken(5.0))
    talk.send("none")
    await talk.until("error")
    assert talk.service.bodies.held == 2 * 16_000 * 11
    await talk.leave()
    assert (talk.service.bodies.held, ears.samples, ears.payloads) == (0, 0, [])


@pytest.mark.parametrize(
    ("format", "rate"), [("audio/pcm", 24_000), ("audio/pcm", 16_000), ("audio/pcmu", 8_000)]
)
def test_no_more_comes_of_bytes_than_is_counted(format: str, rate: int) -> None:
    data = np.random.default_rng(3).integers(0, 256, 60_001).astype(np.uint8).tobytes()
    for step in (1, 7, 4_000, 60_001):
        intake = Intake(format, rate)
        for at in range(0, 20 * step if step < 100 else len(data), step):
            piece = data[at : at + step]
            assert len(intake.take(piece)) <= 2 * intake.most(len(piece))
        assert len(intake.rest()) <= 2 * intake.most(0)


@asynccontextmanager
async def served(app: Application) -> AsyncIterator[str]:
    """The address of a server in this loop."""
    listener = http_server(app, None, app.state.meter, backlog=10, last_words=1.0, websockets=True)
    with sockets.create_server(("127.0.0.1", 0)) as door:
        task = asyncio.create_task(listener.serve([door]))
        try:
            yield f"ws://127.0.0.1:{door.getsockname()[1]}/v1/realtime"
        finally:
            listener.should_exit = True
            await task


async def test_sessions_have_a_number(ears: FakeHearing) -> None:
    app = create_app(ears, ServerOptions())  # type: ignore[arg-type]
    app.state.service.bodies.sessions = Shares(1, "as many sessions are open as are allowed")
    async with served(app) as url:
        async with websockets.connect(url) as first:
            await first.recv()
            with pytest.raises(websockets.InvalidStatus) as refused:
                await websockets.connect(url)
            response = refused.value.response
            assert response.status_code == 503
            assert json.loads(response.body)["error"]["code"] == "overloaded"
        while app.state.service.bodies.sessions.held:
            await asyncio.sleep(0.001)
        async with websockets.connect(url) as again:
            await again.recv()


async def test_frames_without_utf_8_are_counted_and_logged_by_nobody(
    ears: FakeHearing, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(ears, ServerOptions())  # type: ignore[arg-type]
    async with served(app) as url:
        for _ in range(3):
            async with websockets.connect(url) as socket:
                await socket.recv()
                await socket.send(b"\xff\xfe", text=True)
                with pytest.raises(websockets.ConnectionClosed) as closed:
                    await socket.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1007
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []
    refused = app.state.meter.registry.get_sample_value
    assert refused("headrace_refused_total", {"code": "invalid_utf8"}) == 3


def frame(text: str, *, first: bool = True, last: bool = True) -> bytes:
    head = bytes([0x80 * last | first, 0x80 | len(text)])
    return head + bytes(4) + text.encode()  # A mask of zeros.


async def test_what_comes_at_once_stays_bytes_until_it_is_taken(
    ears: FakeHearing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of messages in one read, and a message of thousands of frames."""
    from headrace.server.socket_protocol import BoundedSocket  # Needs websockets.

    most = {"messages": 0, "parts": 0}
    send = BoundedSocket.send_receive_event_to_app

    def counted(self: Any) -> None:
        most["parts"] = max(most["parts"], len(self.frames))
        send(self)
        most["messages"] = max(most["messages"], self.queue.qsize())

    monkeypatch.setattr(BoundedSocket, "send_receive_event_to_app", counted)
    app = create_app(ears, ServerOptions())  # type: ignore[arg-type]
    async with served(app) as url, websockets.connect(url, max_queue=None) as socket:
        await socket.recv()
        text = json.dumps({"type": "x", "event_id": "y" * 3_000})
        parts = [frame(text[at], first=not at, last=at == len(text) - 1) for at in range(len(text))]
        socket.transport.write(b"".join(parts))
        assert json.loads(await socket.recv())["error"]["event_id"] == "y" * 3_000
        many = [frame(f'{{"type":"x","event_id":"{number}"}}') for number in range(2_000)]
        socket.transport.write(b"".join(many))
        told = [json.loads(await socket.recv())["error"]["event_id"] for _ in range(2_000)]
    assert told == [str(number) for number in range(2_000)]
    assert most["parts"] == 1
    assert most["messages"] <= 4096 // len(many[0]) + 1
