"""Sessions over a websocket for a long time, most of their clients bad: does anything stay behind?

    python tests/server/live_soak.py [--minutes 10] [--good 3] [--bad 24] [--json FILE]

A real server on a small Moonshine (random weights; `--model` takes another). Good clients speak
three stretches with pauses and must be told the same text each time. Beside them, all the time, bad
ones that are drawn at random: they close in the middle of a frame, vanish without a word, leave a
handshake half said, never read what they provoke, flood, send what is no frame, no text, no JSON,
no event, no samples, messages that are too long or never end, and connections that stay silent.

Each second the resident memory of both processes and the open descriptors of the server are noted.
Fails (exit 1) where memory grows from the second quarter to the last by more than `--growth` MiB,
descriptors, sessions or sounds are left at the end, or a good client was told something else.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import websockets

sys.path.insert(0, str(Path(__file__).parents[1]))

from exposed import metric
from processes import api_pid, headrace, running

from tiny import moonshine

RATE = 24_000
PATH = "/v1/realtime?intent=transcription"
TURNS = 3
PATIENCE = 60.0
"""Seconds for a turn of a good client."""
COMPLETED = "conversation.item.input_audio_transcription.completed"
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def spoken(pitch: float, seconds: float) -> np.ndarray[Any, Any]:
    """Something with loud and quiet parts, and then nothing, as pcm at `RATE`."""
    t = np.arange(int(RATE * seconds)) / RATE
    loud = 0.3 * np.sin(2 * np.pi * (pitch + 50 * np.sin(3 * t)) * t) * (1.2 + np.sin(9 * t)) / 2
    quiet = np.zeros(int(RATE * 0.9))
    return (np.concatenate((quiet[: RATE // 4], loud, quiet)) * 32767).astype("<i2")


SPEECH = np.concatenate([spoken(180.0 + 90 * turn, 0.9 + 0.3 * turn) for turn in range(TURNS)])


def append(data: bytes) -> str:
    audio = base64.b64encode(data).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


def frame(payload: bytes, code: int = 1, *, last: bool = True, said: int | None = None) -> bytes:
    """A client's frame (RFC 6455, 5.2) under a mask of zeros. `said`: its length by its head."""
    size = len(payload) if said is None else said
    head = bytes([code | (0x80 if last else 0)])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 65_536:
        head += bytes([0x80 | 126]) + size.to_bytes(2, "big")
    else:
        head += bytes([0x80 | 127]) + size.to_bytes(8, "big")
    return head + bytes(4) + payload


class LiveSoak:
    """Everybody who is connected, what they did, and what went wrong."""

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        host, port = url.removeprefix("http://").split(":")
        self._at = host, int(port)
        self.end = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.turn_seconds: list[float] = []
        self._texts: list[str] | None = None

    # Good clients

    async def good(self) -> None:
        while time.monotonic() < self.end and not self.faults:
            try:
                texts = await self._session()
            except Exception as fault:  # noqa: BLE001 - whatever it was, it is told at the end
                self.faults.append(f"a good client: {type(fault).__name__}: {fault}")
                return
            if self._texts is None:
                self._texts = texts
            if texts != self._texts:
                self.faults.append(f"a good client was told {texts}, others {self._texts}")
            self.counts["good sessions"] += 1

    async def _session(self) -> list[str]:
        """The texts of all that was said, fed as fast as it is taken."""
        texts: list[str] = []
        data = SPEECH.tobytes()
        async with websockets.connect(self.url.replace("http", "ws") + PATH) as connection:

            async def feed() -> None:
                for at in range(0, len(data), 9_600):
                    await connection.send(append(data[at : at + 9_600]))

            feeding = asyncio.ensure_future(feed())
            begin = time.monotonic()
            while len(texts) < TURNS:
                async with asyncio.timeout(PATIENCE):
                    event = json.loads(await connection.recv())
                if event["type"] == "error" or event["type"].endswith(".failed"):
                    raise AssertionError(event)
                if event["type"] == COMPLETED:
                    texts.append(event["transcript"])
                    self.turn_seconds.append(time.monotonic() - begin)
                    begin = time.monotonic()
            await feeding
        return texts

    # Bad ones

    async def bad(self, seed: int) -> None:
        draw = random.Random(seed)
        kinds: list[tuple[str, Callable[[random.Random], Awaitable[None]]]] = [
            ("half a handshake", self._half_handshake),
            ("closed in a frame", self._half_frame),
            ("vanished", self._vanish),
            ("silent", self._silent),
            ("reads nothing", self._deaf),
            ("floods", self._flood),
            ("no frames", self._noise),
            ("wrong events", self._wrong_events),
            ("never ends", self._endless),
        ]
        while time.monotonic() < self.end:
            name, act = draw.choice(kinds)
            # What a bad client is told, and how it is thrown out, is the server's to choose.
            with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
                await asyncio.wait_for(act(draw), 30)
            self.counts[name] += 1

    async def _opened(self, room: int = 0) -> Wire:
        """A session's connection behind its handshake. `room`: bytes that the system keeps of what
        is not read."""
        made = socket.socket()
        made.setblocking(False)
        if room:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        try:
            await asyncio.get_running_loop().sock_connect(made, self._at)
            wire = await asyncio.open_connection(sock=made, limit=room or 65_536)
        except BaseException:
            made.close()
            raise
        key = base64.b64encode(random.randbytes(16)).decode()
        wire[1].write(
            f"GET {PATH} HTTP/1.1\r\nHost: {self._at[0]}:{self._at[1]}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        status = await wire[0].readuntil(b"\r\n\r\n")
        if b" 101 " not in status:
            self.faults.append(f"a handshake: {status[:200]!r}")
        return wire

    async def _half_handshake(self, draw: random.Random) -> None:
        _, writer = await asyncio.open_connection(*self._at)
        writer.write(f"GET {PATH} HTTP/1.1\r\nUpgrade: websocket\r\nSec-We".encode())
        await asyncio.sleep(draw.random())
        writer.transport.abort() if draw.random() < 0.5 else writer.close()

    async def _half_frame(self, draw: random.Random) -> None:
        _, writer = await self._opened()
        writer.write(frame(b'{"type": "input_', said=draw.choice((100, 5_000, 1_000_000))))
        await asyncio.sleep(draw.random())
        writer.transport.abort() if draw.random() < 0.5 else writer.close()

    async def _vanish(self, draw: random.Random) -> None:
        """In the middle of what it says, committed or not, while it is heard."""
        _, writer = await self._opened()
        data = SPEECH.tobytes()
        for at in range(0, draw.randrange(9_600, len(data)), 9_600):
            writer.write(frame(append(data[at : at + 9_600]).encode()))
            await writer.drain()
        await asyncio.sleep(draw.random() * 0.3)
        writer.transport.abort()

    async def _silent(self, draw: random.Random) -> None:
        _, writer = await self._opened()
        await asyncio.sleep(draw.random() * 10)
        writer.transport.abort()

    async def _deaf(self, draw: random.Random) -> None:
        """Provokes answers and reads none, until the server reads no more either."""
        reader, writer = await self._opened(room=2_048)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        wrong = frame(b'{"type": "' + b"x" * 90 + b'"}')
        for _ in range(draw.randrange(100, 2_000)):
            writer.write(wrong * 50)
            try:
                await asyncio.wait_for(writer.drain(), 2.0)
            except TimeoutError:
                self.counts["was not read from"] += 1
                break
        await asyncio.sleep(draw.random() * 3)
        writer.transport.abort()

    async def _flood(self, draw: random.Random) -> None:
        """Samples as fast as they go, and events of a session between them."""
        reader, writer = await self._opened()
        reading = asyncio.ensure_future(reader.read())
        loud = draw.random() < 0.5
        part = draw.randbytes(48_000) if loud else bytes(48_000)
        part, until = frame(append(part).encode()), time.monotonic() + draw.random() * 4
        try:
            while time.monotonic() < until:
                writer.write(part)
                if draw.random() < 0.1:
                    writer.write(frame(b'{"type": "input_audio_buffer.clear"}'))
                    writer.write(frame(b"", 9) * 20)
                await writer.drain()
        finally:
            writer.transport.abort()
            reading.cancel()

    async def _noise(self, draw: random.Random) -> None:
        reader, writer = await self._opened()
        for _ in range(draw.randrange(1, 20)):
            writer.write(draw.randbytes(draw.randrange(1, 4_000)))
            await writer.drain()
            await asyncio.sleep(0.01)
        await asyncio.wait_for(reader.read(), 10)
        writer.close()

    async def _wrong_events(self, draw: random.Random) -> None:
        reader, writer = await self._opened()
        reading = asyncio.ensure_future(reader.read())
        events = [
            b"",
            b"[" * 10_000,
            b'{"type": "input_audio_buffer.append", "audio": "%%"}',
            b'{"type": "input_audio_buffer.append", "audio": "AAA="}',
            b'{"type": "input_audio_buffer.commit"}',
            b'{"type": "session.update", "session": {"audio": {"input": {"format": 7}}}}',
            b'{"type": "session.update", "session": {"include": []}}',
            b'{"type": "response.create", "event_id": 7}',
            b'{"type": "\xf0\x9f\x99\x82"}',
            b"\x00" * 900,
            append(bytes(400_000)).encode(),
        ]
        for _ in range(draw.randrange(5, 60)):
            code = 2 if draw.random() < 0.1 else 1
            writer.write(frame(draw.choice(events), code))
            await writer.drain()
        writer.write(frame((1000).to_bytes(2, "big"), 8))
        await asyncio.wait_for(reading, 25)
        writer.close()

    async def _endless(self, draw: random.Random) -> None:
        """A message in parts that has no last one, or one that is longer than is taken."""
        reader, writer = await self._opened()
        part = bytes(draw.choice((200, 60_000)))
        writer.write(frame(part, 1, last=False))
        for _ in range(40):
            writer.write(frame(part, 0, last=False))
            await writer.drain()
        writer.write(frame(b"", 1, said=1 << 40))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(), draw.random() * 5)
        writer.transport.abort()


async def watch(api: psutil.Process, soak: LiveSoak) -> list[tuple[float, float, float, int]]:
    """(seconds, MiB of the API process, MiB of the one that hears, descriptors), each second."""
    begin, seen = time.monotonic(), []
    (ears,) = [one for one in api.children(recursive=True) if "hearing" in str(one.cmdline())]
    while time.monotonic() < soak.end:
        sizes = [one.memory_info().rss / 2**20 for one in (api, ears)]
        seen.append((time.monotonic() - begin, *sizes, api.num_fds()))
        await asyncio.sleep(1.0)
    return seen


async def left_behind(soak: LiveSoak, api: psutil.Process, descriptors: int) -> dict[str, float]:
    """What has not ended a while after everybody left."""
    left: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=soak.url) as client:
        for _ in range(150):
            text = (await client.get("/metrics")).text
            left = {
                "sessions": metric(text, "headrace_live_sessions"),
                "sounds": metric(text, "headrace_sounds_running"),
                "waiting": metric(text, "headrace_sounds_waiting"),
                "in work": metric(text, "headrace_http_requests_in_work"),
                "descriptors": max(0, api.num_fds() - descriptors - 1),
            }
            if not any(left.values()):
                break
            await asyncio.sleep(0.2)
        left["restarts"] = metric(text, "headrace_hearing_restarts_total")
    return left


async def drive(url: str, pid: int, given: argparse.Namespace) -> dict[str, Any]:
    api = psutil.Process(pid)
    descriptors = api.num_fds()
    soak = LiveSoak(url, given.minutes * 60)
    watcher = asyncio.create_task(watch(api, soak))
    clients = [soak.good() for _ in range(given.good)]
    clients += [soak.bad(given.seed + place) for place in range(given.bad)]
    await asyncio.gather(*clients)
    memory = await watcher
    left = await left_behind(soak, api, descriptors)
    quarter = len(memory) // 4
    growth = {
        name: round(
            statistics.median(row[column] for row in memory[-quarter:])
            - statistics.median(row[column] for row in memory[quarter : 2 * quarter]),
            2,
        )
        for name, column in (("api", 1), ("ears", 2))
    }
    turns = sorted(soak.turn_seconds)
    return {
        "minutes": given.minutes,
        "good": given.good,
        "bad": given.bad,
        "seed": given.seed,
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "counts": dict(soak.counts.most_common()),
        "turns": len(turns),
        "turn_seconds": {
            name: round(turns[int(share * (len(turns) - 1))], 2)
            for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0))
            if turns
        },
        "faults": soak.faults[:20],
        "left": left,
        "growth_mib": growth,
        "memory": [[round(value, 2) for value in row] for row in memory],
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--minutes", type=float, default=10)
    arguments.add_argument("--good", type=int, default=3, help="clients that say something")
    arguments.add_argument("--bad", type=int, default=24, help="clients that misbehave")
    arguments.add_argument("--model", help="another model than the small one")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--growth", type=float, default=16.0, help="MiB that are allowed")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.model is None:
            moonshine.make(Path(folder))
        model = given.model or folder
        command = headrace("serve", model, "--port", "0", "--threads", "2", "--log-level", "error")
        with running(command) as server:
            record = asyncio.run(drive(server.url, api_pid(server), given))
    if given.json:
        given.json.write_text(json.dumps(record) + "\n")
    print(json.dumps({name: value for name, value in record.items() if name != "memory"}, indent=1))
    grown = max(record["growth_mib"].values()) > given.growth
    bad = record["faults"] or any(record["left"].values()) or grown or not record["turns"]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
