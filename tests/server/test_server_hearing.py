"""A server that hears, by OpenAI's own client: files, streams, sessions, and what goes wrong."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
from processes import Running, api_pid, headrace, running

from headrace.base.errors import DownloadError
from headrace.loader.catalog import CATALOG
from headrace.loader.download import fetch_catalog

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
websockets = pytest.importorskip("websockets", reason="needs the extra audio")
ESPEAK = shutil.which("espeak-ng")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ESPEAK is None, reason="espeak-ng is not installed"),
]
TEXT = "The meeting begins on Tuesday at nine. Please bring the annual budget."


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talk") / "talk.wav"
    subprocess.run([str(ESPEAK), "-v", "en-us", "-s", "150", "-w", str(path), TEXT], check=True)
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    try:
        fetch_catalog(CATALOG["whisper-base"])
    except DownloadError as error:
        pytest.skip(f"no whisper-base: {error.message}")
    with running(headrace("serve", "whisper-base", "--port", "0", "--threads", "2")) as one:
        yield one


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai()


def plain(text: str) -> set[str]:
    return set("".join(x for x in text.lower() if x.isalnum() or x == " ").split())


def assert_heard(text: str) -> None:
    wanted = plain(TEXT)
    assert len(wanted & plain(text)) >= 0.6 * len(wanted), text


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # The client's own.
def test_files_in_every_form(client: openai.OpenAI, talk: Path) -> None:
    said = client.audio.transcriptions.create(
        model="whisper-base", file=talk, include=["logprobs"], language="english"
    )
    assert_heard(said.text)
    assert said.usage is not None
    assert said.usage.seconds == int(np.ceil(soundfile.info(talk).duration))
    assert said.logprobs is not None
    heard = b"".join(bytes(map(int, one.bytes or ())) for one in said.logprobs)
    assert heard.decode().strip() == said.text
    assert all((one.logprob or 0) <= 0 for one in said.logprobs)
    verbose = client.audio.transcriptions.create(
        model="whisper-base",
        file=talk,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert verbose.language == "english"
    assert verbose.words
    assert verbose.segments
    assert_heard(" ".join(word.word for word in verbose.words))
    starts = [word.start for word in verbose.words]
    assert starts == sorted(starts)
    assert verbose.words[-1].end <= float(verbose.duration) + 0.1
    srt = client.audio.transcriptions.create(
        model="whisper-base", file=talk, response_format="srt", chunking_strategy="auto"
    )
    assert srt.startswith("1\n00:00:0")
    vtt = client.audio.translations.create(
        model="whisper-base", file=talk, response_format="vtt", prompt="A meeting."
    )
    assert vtt.startswith("WEBVTT\n\n00:00")


def test_a_stream_of_a_file(client: openai.OpenAI, talk: Path) -> None:
    events = list(
        client.audio.transcriptions.create(
            model="whisper-base",
            file=talk,
            stream=True,
            chunking_strategy={"type": "server_vad", "silence_duration_ms": 200},
        )
    )
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    done = events[-1]
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in events[:-1]).strip() == done.text
    assert_heard(done.text)


def test_a_stream_has_times_where_they_are_asked_for(server: Running, talk: Path) -> None:
    form = {"stream": "true", "response_format": "verbose_json", "language": "English"}
    with talk.open("rb") as sound:
        reply = httpx.post(
            f"{server.url}/v1/audio/transcriptions", data=form, files={"file": sound}, timeout=120
        )
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    *deltas, done = map(json.loads, lines)
    pieces = [piece for delta in deltas for piece in delta["segments"]]
    assert [piece["id"] for piece in pieces] == list(range(len(pieces)))
    assert pieces == done["segments"]
    assert "".join(piece["text"] for piece in pieces).strip() == done["text"]
    assert (done["language"], done["task"]) == ("english", "transcribe")
    listed = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert listed["input_modalities"] == ["audio"]
    assert {"en", "de", "yo"} <= set(listed["languages"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"temperature": "7"}, "temperature"),
        ({"response_format": "diarized_json"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"known_speaker_names[]": "Ann"}, "known_speaker_names"),
        ({"chunking_strategy": "{"}, "chunking_strategy"),
        ({"stream": "true", "response_format": "srt"}, "response_format"),
        ({"model": "whisper-1"}, "model"),
    ],
)
def test_wrong_fields_are_named(
    server: Running, talk: Path, fields: dict[str, str], param: str
) -> None:
    with talk.open("rb") as file:
        reply = httpx.post(
            f"{server.url}/v1/audio/transcriptions", data=fields, files={"file": file}
        )
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == param


def test_what_is_no_sound_or_too_large(server: Running) -> None:
    url = f"{server.url}/v1/audio/transcriptions"
    assert httpx.post(url, files={"file": b"#!/bin/sh\n"}).json()["error"]["param"] == "file"
    assert httpx.post(url, data={"prompt": "x"}, files={"other": b"1"}).status_code == 400
    reply = httpx.post(f"{server.url}/v1/audio/translations", files={"file": b"no sound"})
    assert reply.status_code == 400
    reply = httpx.post(url, files={"file": b"RIFF" + bytes(26 << 20)}, timeout=60)
    assert reply.status_code == 413


def test_other_routes_are_refused_by_name(server: Running) -> None:
    body = {"model": "whisper-base", "messages": [{"role": "user", "content": "hi"}]}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "unsupported_model"
    assert "/v1/audio/transcriptions" in reply.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["task"] == "transcription"
    assert "headrace_audio_seconds_total" in httpx.get(f"{server.url}/metrics").text
    assert httpx.get(f"{server.url}/v1/realtime").status_code == 426


def test_mutated_files_harm_nobody(server: Running, talk: Path, tmp_path: Path) -> None:
    """Some hundreds; `tests/media` has the formats, this the whole way."""
    draw = random.Random(7)
    samples, rate = soundfile.read(talk, frames=8000)
    sources = []
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        made = io.BytesIO()
        soundfile.write(made, samples, rate, format=kind)
        sources.append(made.getvalue())
    api = psutil.Process(api_pid(server))
    url = f"{server.url}/v1/audio/transcriptions"
    before = 0
    with httpx.Client(timeout=200) as session:
        for number in range(120):
            data = bytearray(draw.choice(sources))
            for _ in range(draw.randint(1, 30)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            part = bytes(data[: draw.randint(40, len(data))])
            # One pass each: what is noise by now is not to be tried at six temperatures.
            asked = {"language": "en", "temperature": "1"}
            reply = session.post(url, data=asked, files={"file": part})
            assert reply.status_code in (200, 400), reply.text
            if number == 40:
                before = api.memory_info().rss
    assert api.memory_info().rss < before + (24 << 20)
    assert httpx.get(f"{server.url}/health").status_code == 200


def pcm(talk: Path, seconds_behind: float = 1.0) -> bytes:
    import soxr

    samples, rate = soundfile.read(talk, dtype="float32")
    samples = soxr.resample(samples, rate, 24_000)
    silence = np.zeros(int(24_000 * seconds_behind), np.float32)
    whole = np.concatenate((np.zeros(6000, np.float32), samples, silence))
    return (whole * 32767).astype("<i2").tobytes()


async def fed(connection: Any, data: bytes, step: int = 9600) -> None:
    for at in range(0, len(data), step):
        audio = base64.b64encode(data[at : at + step]).decode()
        await connection.input_audio_buffer.append(audio=audio)


async def test_a_session_with_openais_client(server: Running, talk: Path) -> None:
    asked: Any = {"model": "whisper-base", "extra_query": {"intent": "transcription"}}
    kinds, deltas, done = [], [], None
    async with (
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client,
        client.realtime.connect(**asked) as connection,
    ):
        vad = {"type": "server_vad", "silence_duration_ms": 700}
        said = {"model": "whisper-base", "language": "en"}
        await connection.session.update(
            session={
                "type": "transcription",
                "audio": {"input": {"transcription": said, "turn_detection": vad}},
                "include": ["item.input_audio_transcription.logprobs"],
            }
        )
        feeding = asyncio.ensure_future(fed(connection, pcm(talk)))
        texts = []
        async with asyncio.timeout(120):
            async for event in connection:
                kinds.append(event.type)
                if event.type.endswith("transcription.delta"):
                    deltas.append(event.delta)
                if event.type.endswith("transcription.completed"):
                    done = event
                    texts.append(event.transcript)
                    if feeding.done() and len(plain(" ".join(texts))) > 6:
                        break
    assert kinds[:2] == ["session.created", "session.updated"]
    order = [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "conversation.item.input_audio_transcription.completed",
    ]
    assert [kind for kind in order if kind in kinds] == order
    assert_heard(" ".join(texts))
    assert done is not None
    assert done.logprobs
    assert done.usage is not None


async def test_commits_by_hand_errors_and_the_betas_events(server: Running, talk: Path) -> None:
    url = server.url.replace("http", "ws") + "/v1/realtime?intent=transcription"
    headers = {"OpenAI-Beta": "realtime=v1"}
    async with websockets.connect(url, additional_headers=headers) as socket:

        async def until(kind: str) -> dict[str, Any]:
            async with asyncio.timeout(120):
                while True:
                    event: dict[str, Any] = json.loads(await socket.recv())
                    if event["type"].endswith(kind):
                        return event

        async def send(**event: Any) -> None:
            await socket.send(json.dumps(event))

        assert (await until("created"))["type"] == "transcription_session.created"
        session = {"input_audio_format": "pcm16", "turn_detection": None}
        await send(type="transcription_session.update", session=session)
        assert (await until("updated"))["session"]["audio"]["input"]["turn_detection"] is None
        for event, code in (
            ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_commit_empty"),
            ({"type": "response.create", "event_id": "mine"}, "invalid_value"),
            ({"type": "input_audio_buffer.append", "audio": "%%"}, "invalid_value"),
            ({"type": "session.update", "session": {"foo": 1}}, "unknown_parameter"),
        ):
            await send(**event)
            error = (await until("error"))["error"]
            assert error["code"] == code
            assert error["event_id"] == event.get("event_id")
        await socket.send("no json")
        assert (await until("error"))["error"]["code"] == "invalid_json"
        await socket.send(b"\0" * 10)
        assert (await until("error"))["error"]["code"] == "invalid_event"
        data = pcm(talk, 0.0)
        for at in range(0, len(data), 96_000):
            audio = base64.b64encode(data[at : at + 96_000]).decode()
            await send(type="input_audio_buffer.append", audio=audio)
        await send(type="input_audio_buffer.commit")
        assert_heard((await until("completed"))["transcript"])


async def test_pages_of_strangers_open_no_session(server: Running) -> None:
    url = server.url.replace("http", "ws") + "/v1/realtime"
    for more, status in (
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example"}, 421),
    ):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(url, additional_headers=more) if "Host" not in more else (
                await _with_host(url, "evil.example")
            )
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]["message"]


async def _with_host(url: str, host: str) -> None:
    port = url.split(":")[2].split("/")[0]
    await websockets.connect(f"ws://{host}/v1/realtime", host="127.0.0.1", port=int(port))


async def test_a_death_in_the_middle_is_not_noticed(server: Running, talk: Path) -> None:
    """The next process hears what the one before did not end, of file and session alike."""
    async with (
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", timeout=120) as client,
        client.realtime.connect(model="whisper-base") as connection,
    ):
        asking = asyncio.ensure_future(
            client.audio.transcriptions.create(model="whisper-base", file=talk)
        )
        while not (await in_work(server) or asking.done()):
            await asyncio.sleep(0.02)
        await fed(connection, pcm(talk))
        await asyncio.sleep(0.7)
        hearing_process(server).kill()
        done: list[str] = []
        async with asyncio.timeout(120):
            async for event in connection:
                if event.type.endswith("transcription.failed"):
                    raise AssertionError(event)
                if event.type.endswith("transcription.completed"):
                    done.append(event.transcript)
                    if len(plain(" ".join(done))) > 6:
                        break
        assert_heard((await asking).text)
    assert_heard(" ".join(done))
    assert "headrace_hearing_restarts_total" in httpx.get(f"{server.url}/metrics").text
    async with asyncio.timeout(60):  # All may have been heard before the kill: it restarts yet.
        while (
            await asyncio.to_thread(httpx.get, f"{server.url}/v1/health/ready")
        ).status_code != 200:
            await asyncio.sleep(0.1)


async def in_work(server: Running) -> bool:
    """Whether a sound is heard or waits for its turn."""
    text = (await asyncio.to_thread(httpx.get, f"{server.url}/metrics")).text
    wanted = r"^headrace_sounds_(?:running|waiting)\{.*\} (\S+)$"
    return any(float(value) for value in re.findall(wanted, text, re.MULTILINE))


def hearing_process(server: Running) -> psutil.Process:
    return next(
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "headrace.engine.process" in child.cmdline()
    )


async def test_slow_and_vanishing_clients(server: Running, talk: Path) -> None:
    """A soak of some seconds: nobody's session is another's trouble, and nothing is left."""
    url = server.url.replace("http", "ws") + "/v1/realtime"
    data = pcm(talk, 0.5)[:96_000]
    audio = base64.b64encode(data).decode()
    event = json.dumps({"type": "input_audio_buffer.append", "audio": audio})

    async def vanish(number: int) -> None:
        socket = await websockets.connect(url)
        await socket.send(event)
        await asyncio.sleep(0.05 * (number % 5))
        if number % 2:
            socket.transport.abort()
        else:
            await socket.close()

    async def dawdle() -> None:
        async with websockets.connect(url, max_queue=1) as socket:
            for _ in range(20):
                await socket.send("{}")
                await asyncio.sleep(0.02)

    await asyncio.gather(*(vanish(number) for number in range(24)), *(dawdle() for _ in range(4)))
    async with asyncio.timeout(60):
        while 'headrace_live_sessions{model_name="whisper-base"} 0.0' not in (
            httpx.get(f"{server.url}/metrics").text
        ):
            await asyncio.sleep(0.2)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_drain_ends_sessions_and_says_so(talk: Path) -> None:
    del talk
    words = ["serve", "whisper-base", "--port", "0", "--threads", "2", "--drain-seconds", "600"]
    with running(headrace(*words)) as server:

        async def session() -> int:
            url = server.url.replace("http", "ws") + "/v1/realtime"
            async with websockets.connect(url) as socket:
                await socket.recv()
                server.signal()
                event = json.loads(await socket.recv())
                assert event["error"]["code"] == "session_ended"
                with pytest.raises(websockets.ConnectionClosed) as closed:
                    await socket.recv()
                assert closed.value.rcvd is not None
                return closed.value.rcvd.code

        assert asyncio.run(session()) == 1001
        assert server.wait() == 0, "it waited for what it had ended"


def test_it_is_measured_beside_its_roofline(server: Running, talk: Path, tmp_path: Path) -> None:
    shutil.copy(talk, tmp_path / "talk.wav")
    (tmp_path / "talk.txt").write_text(TEXT)
    command = headrace("bench", "hear", str(tmp_path), "--url", server.url, "--language", "en")
    command += ["--out", str(tmp_path / "out"), "--json"]
    for more in (
        ["--requests", "3", "--roofline", "whisper-base", "--hardware", "H100"],
        ["--live"],
    ):
        done = subprocess.run([*command, *more], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["failed"] == 0
        assert result["words"]["rate"] < 0.4
        assert result["live"] or 0 < result["roofline"]["share"] < 1
        assert (tmp_path / "out" / "texts.jsonl").read_text().count("\n") == result["requests"]
    assert result["metrics"]["first_partial_seconds"]["mean"] > 0
