"""Answers of a served Moonshine, and their fate when its process hangs or dies."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
from processes import Running, headrace, running

from headrace.engine.hearing.opening import open_transcriber
from headrace.media import decode
from tiny.moonshine import make

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
websockets = pytest.importorskip("websockets", reason="needs the extra audio")
pytestmark = pytest.mark.slow
SOAK = Path(__file__).with_name("live_soak.py")
COMPLETED = "conversation.item.input_audio_transcription.completed"
FAILED = "conversation.item.input_audio_transcription.failed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("moonshine")
    make(where)
    return where


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--dtype", "float32"]
    with running(headrace(*words)) as one:
        yield one


def spoken(seconds: float) -> np.ndarray[Any, Any]:
    t = np.arange(int(16_000 * seconds)) / 16_000
    loud = np.sin(2 * np.pi * (300 + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    return (0.3 * 32767 * loud * (t % 5 < 4)).astype("<i2")


def wav(seconds: float) -> bytes:
    room = io.BytesIO()
    soundfile.write(room, spoken(seconds), 16_000, format="WAV")
    return room.getvalue()


def transcribed(server: Running, data: bytes) -> httpx.Response:
    url = f"{server.url}/v1/audio/transcriptions"
    return httpx.post(url, files={"file": data}, timeout=300)


def ears(server: Running) -> psutil.Process:
    """The process that hears, once there is one."""
    for _ in range(2_000):
        for child in psutil.Process(server.process.pid).children(recursive=True):
            try:
                if "headrace.engine.process" in child.cmdline():
                    return child
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.01)
    raise AssertionError("there is no process that hears")


def failures(server: Running, kind: str) -> float:
    text = httpx.get(server.url + "/metrics").text
    (found,) = re.findall(
        rf'headrace_hearing_failures_total\{{[^}}]*kind="{kind}"[^}}]*\}} (\S+)', text
    )
    return float(found)


def await_ready(server: Running) -> None:
    for _ in range(1800):
        if httpx.get(server.url + "/health").status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError("the server does not come back")


async def begun(connection: Any) -> None:
    """A session in which the client commits, and that has something to commit."""
    session = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
    session["audio"]["input"]["format"] = {"type": "audio/pcm", "rate": 16_000}  # type: ignore[index]
    await connection.send(json.dumps({"type": "session.update", "session": session}))
    await say(connection)


async def say(connection: Any) -> None:
    import base64

    audio = base64.b64encode(spoken(4.0).tobytes()).decode()
    await connection.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
    await connection.send(json.dumps({"type": "input_audio_buffer.commit"}))


def heard_or_told(reply: httpx.Response, text: str) -> None:
    """The text, or, where a next process takes its time to start, an error that says so."""
    if reply.status_code == 503:
        assert reply.json()["error"]["code"] == "engine_dead"
        assert int(reply.headers["retry-after"]) >= 1
    else:
        assert reply.status_code == 200, reply.text
        assert reply.json()["text"] == text


def turn_or_told(event: dict[str, Any], text: str) -> None:
    if event["type"] == FAILED:
        assert event["error"]["code"] == "engine_dead"
    else:
        assert event["transcript"] == text


async def end_of_turn(connection: Any) -> dict[str, Any]:
    async with asyncio.timeout(240):
        while True:
            event: dict[str, Any] = json.loads(await connection.recv())
            if event["type"] in (COMPLETED, FAILED):
                return event


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # The client's own.
def test_a_moonshine_is_served(server: Running, folder: Path) -> None:
    client = server.openai()
    talk = wav(9.0)
    wanted = open_transcriber(str(folder), 2, "exact").transcribe(decode(talk).samples)
    assert len(wanted.text) > 10
    file = ("talk.wav", talk)
    verbose = client.audio.transcriptions.create(
        model="", file=file, response_format="verbose_json"
    )
    assert verbose.text == wanted.text
    assert [(one.start, one.end) for one in verbose.segments or ()] == [
        (one.start, one.end) for one in wanted.segments
    ]
    events = list(client.audio.transcriptions.create(model="", file=file, stream=True))
    assert events[-1].text == wanted.text  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="word"):
        client.audio.transcriptions.create(
            model="", file=file, response_format="verbose_json", timestamp_granularities=["word"]
        )
    with pytest.raises(openai.BadRequestError, match="does not translate"):
        client.audio.translations.create(model="", file=file)
    with pytest.raises(openai.BadRequestError, match="language"):
        client.audio.transcriptions.create(model="", file=file, language="de")


async def test_a_session_outlives_a_hang(server: Running) -> None:
    """A process that is stopped is ended after its silence; the next hears file and session."""
    talk, before = wav(120.0), failures(server, "hang")
    wanted = transcribed(server, talk).json()["text"]
    url = server.url.replace("http", "ws") + "/v1/realtime"
    async with websockets.connect(url) as connection:
        await begun(connection)
        turn = (await end_of_turn(connection))["transcript"]
        stopped = ears(server)
        stopped.send_signal(signal.SIGSTOP)
        try:
            asking = asyncio.create_task(asyncio.to_thread(transcribed, server, talk))
            await say(connection)
            turn_or_told(await end_of_turn(connection), turn)
        finally:
            if stopped.is_running():
                stopped.send_signal(signal.SIGCONT)
        heard_or_told(await asking, wanted)
        await asyncio.to_thread(await_ready, server)
        await say(connection)
        assert (await end_of_turn(connection))["transcript"] == turn, "the session goes on"
    assert failures(server, "hang") == before + 1


async def test_a_session_outlives_deaths_in_a_row(server: Running) -> None:
    """The next process dies while it starts: the one behind it hears what the first did not end."""
    url = server.url.replace("http", "ws") + "/v1/realtime"
    talk = wav(9.0)
    wanted = transcribed(server, talk).json()["text"]
    async with websockets.connect(url) as connection:
        await begun(connection)
        turn = (await end_of_turn(connection))["transcript"]
        first = ears(server)
        first.send_signal(signal.SIGSTOP)  # So that it is in the middle of both.
        asking = asyncio.create_task(asyncio.to_thread(transcribed, server, talk))
        await say(connection)
        await asyncio.sleep(0.5)
        first.kill()
        while (second := await asyncio.to_thread(ears, server)).pid == first.pid:
            await asyncio.sleep(0.01)
        second.kill()
        turn_or_told(await end_of_turn(connection), turn)
        heard_or_told(await asking, wanted)
        await asyncio.to_thread(await_ready, server)
        await say(connection)
        assert (await end_of_turn(connection))["transcript"] == turn, "the session goes on"
    assert (failures(server, "death"), failures(server, "start")) == (1, 1)


def test_bad_clients_leave_nothing_behind(tmp_path: Path) -> None:
    """The short form of `live_soak.py`."""
    record = tmp_path / "record.json"
    command = [sys.executable, str(SOAK), "--minutes", "0.75", "--growth", "32"]
    done = subprocess.run(
        [*command, "--json", str(record)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(record.read_text())["counts"]
    for kind in ("good sessions", "vanished", "closed in a frame", "floods", "reads nothing"):
        assert counts[kind] > 0
