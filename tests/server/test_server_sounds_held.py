"""Uploads of sound: what they hold is counted, bounded, and let go of when clients leave."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from hearing_fake import FakeHearing

from headrace.base.config import ServerOptions
from headrace.base.errors import Overloaded
from headrace.server.app import Application, create_app

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
pytest.importorskip("soxr", reason="needs the extra audio")
URL = "/v1/audio/transcriptions"
HOUR = 3600


@pytest.fixture
async def ears(tmp_path: Path) -> AsyncIterator[FakeHearing]:
    made = FakeHearing(tmp_path)
    yield made
    await made.settled()


@pytest.fixture
def app(ears: FakeHearing) -> Application:
    return create_app(ears, ServerOptions())  # type: ignore[arg-type]


@pytest.fixture
async def client(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def silence(seconds: float, rate: int = 8_000) -> bytes:
    room = io.BytesIO()
    with soundfile.SoundFile(room, "w", rate, 1, subtype="PCM_16", format="FLAC") as file:
        minute = np.zeros(60 * rate, np.int16)
        for _ in range(int(seconds // 60)):
            file.write(minute)
        file.write(minute[: int(seconds % 60 * rate)])
    return room.getvalue()


def declaring(data: bytes, seconds: int, rate: int = 8_000) -> bytes:
    """A FLAC whose head says another length."""
    numbers = int.from_bytes(data[18:26], "big") >> 36 << 36 | seconds * rate
    return data[:18] + numbers.to_bytes(8, "big") + data[26:]


def decoders() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "headrace.media.child" in child.cmdline()
    ]


async def test_what_nobody_waits_for_is_not_decoded(
    ears: FakeHearing, app: Application, client: httpx.AsyncClient
) -> None:
    """Long files whose clients leave: one is decoded at a time, and killed; none is begun later."""
    long = silence(2 * HOUR)
    asked = [asyncio.create_task(client.post(URL, files={"file": long})) for _ in range(3)]
    while not decoders():
        await asyncio.sleep(0.01)
    for each in asked:
        each.cancel()
    await asyncio.wait(asked)
    assert not decoders()
    await ears.settled()
    assert (ears.payloads, ears.samples, app.state.service.bodies.held) == ([], 0, 0)
    reply = await client.post(URL, files={"file": silence(1)})
    assert (reply.status_code, reply.json()["usage"]["seconds"]) == (200, 1)
    assert [asked.count for asked in ears.asked] == [16_000]
    await ears.settled()
    assert (ears.payloads, ears.samples) == ([], 0)


async def test_a_long_sound_leaves_room_for_a_short_one(client: httpx.AsyncClient) -> None:
    long = silence(2 * HOUR)
    asked = [asyncio.create_task(client.post(URL, files={"file": long})) for _ in range(3)]
    while not decoders():
        await asyncio.sleep(0.01)
    reply = await client.post(URL, files={"file": silence(1)})
    assert reply.status_code == 200
    assert not any(each.done() for each in asked)
    for each in asked:
        each.cancel()
    await asyncio.wait(asked)


async def test_a_declared_length_is_counted_before_it_is_decoded(
    ears: FakeHearing, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was decoded")

    short = silence(1)
    other = ears.payload("", 5 * HOUR * 16_000)
    with monkeypatch.context() as patched:
        patched.setattr("headrace.server.hearing.ears.decode_into", never)
        for seconds, status, why in ((4 * HOUR, 503, "seconds"), (5 * HOUR, 400, "longer")):
            reply = await client.post(URL, files={"file": declaring(short, seconds)})
            assert reply.status_code == status
            assert why in reply.json()["error"]["message"]
    assert (await client.post(URL, files={"file": short})).status_code == 200
    ears.drop(other)


async def test_one_key_has_half_of_the_seconds(ears: FakeHearing) -> None:
    four = ears.payload("alice", 4 * HOUR * 16_000)
    with pytest.raises(Overloaded, match="seconds"):
        ears.payload("alice", 100 * 16_000)
    others = ears.payload("bob", 4 * HOUR * 16_000)
    ears.drop(four)
    await ears.settled()
    ears.drop(ears.payload("alice", 100 * 16_000))
    ears.drop(others)


async def test_a_form_with_half_a_surrogate_is_refused(client: httpx.AsyncClient) -> None:
    reply = await client.post(
        URL,
        files={"file": silence(1)},
        data={"chunking_strategy": '{"type": "\\ud800"}'},
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "chunking_strategy"
    assert "JSON" in reply.json()["error"]["message"]
