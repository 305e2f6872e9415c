"""Load of sounds: requests and sessions against servers that answer as told, and a real one."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import InvalidRequest
from headrace.bench.hearing import SoundLoad
from headrace.bench.hearing_limit import hearing_limit
from headrace.bench.options import RunOptions
from headrace.bench.sounds import HeardSound, Recording, read_recordings
from headrace.bench.word_errors import character_errors, errors, word_errors
from headrace.models.whisper import WhisperArch
from headrace.roofline.hardware import Hardware

pytest.importorskip("soundfile", reason="needs the extra audio")
websockets = pytest.importorskip("websockets", reason="needs the extra audio")


def tone(seconds: float, silence: float = 0.0) -> bytes:
    """A 16 kHz wav: silence, then a tone."""
    times = np.arange(int(16_000 * seconds)) / 16_000
    samples = np.concatenate((np.zeros(int(16_000 * silence)), 0.3 * np.sin(2765 * times)))
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return held.getvalue()


def table(said: list[str], heard: list[str]) -> int:
    """Wagner and Fischer 1974, cell by cell."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (word != other))
    return row[-1]


LETTERS = st.lists(st.sampled_from("abc"), max_size=12)


@given(LETTERS, LETTERS)
def test_errors_are_the_fewest_changes(said: list[str], heard: list[str]) -> None:
    assert errors(said, heard) == table(said, heard)


def test_words_and_characters() -> None:
    found = word_errors("The train, at nine o'clock!", "the TRAIN at 9 o'clock")
    assert (found.said, found.wrong) == (5, 1)
    assert found.rate == 0.2
    assert character_errors("何時 ですか。", "何時ですか").wrong == 0
    assert word_errors("", "noise").rate == 1.0


class Server(ThreadingHTTPServer):
    """Answers the n-th request with the n-th of `answers`, again and again: (status, kind, body);
    keeps what it was sent."""

    answers: list[tuple[int, str, bytes]]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sent: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        self.server.sent.append(self.rfile.read(int(self.headers["Content-Length"])))
        answers = self.server.answers
        status, kind, body = answers[(len(self.server.sent) - 1) % len(answers)]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def events(*each: dict[str, Any]) -> bytes:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in each).encode()


STREAM = events(
    {"type": "transcript.text.delta", "delta": "the train "},
    {"type": "transcript.text.done", "text": "the train is late"},
)
TALKS = [
    Recording("a.wav", tone(0.2), 0.2, "the train is late"),
    Recording("b.wav", tone(0.1), 0.1, None),
]


def heard(url: str, *, live: bool = False, sounds: Any = TALKS, **options: Any) -> dict[str, Any]:
    seen: list[int] = []
    given = RunOptions(url=url, seed=1, **options)
    load = SoundLoad(given, sounds, "en", live=live, watch=seen.append)
    result = load.result({"model": "tiny"}, whole=load.run())
    assert seen == list(range(1, result["requests"] + 1))
    return result


def test_streams_and_whole_answers_are_read(server: Server) -> None:
    server.answers = [
        (200, "text/event-stream", STREAM),
        (200, "application/json", b'{"text": "the train is late"}'),
    ]
    result = heard(server.url, requests=6, concurrency=2, model="tiny")
    assert result["requests"] == 6
    assert result["failed"] == 0
    assert result["words"] == {"said": 12, "wrong": 0, "rate": 0.0}, "of three of them it is known"
    assert result["sound_seconds"] == pytest.approx(3 * 0.3)
    assert result["rtfx"] == pytest.approx(result["sound_seconds"] / result["seconds"])
    assert result["metrics"]["first_text_seconds"]["p50"] > 0
    body = server.sent[0]
    assert b'name="language"\r\n\r\nen\r\n' in body
    assert b'filename="a.wav"' in body or b'filename="b.wav"' in body
    assert any(sound.data in body for sound in TALKS)


def test_arrivals_are_kept_whatever_is_open(server: Server) -> None:
    server.answers = [(200, "text/event-stream", STREAM)]
    result = heard(server.url, requests=10, arrivals="constant:100")
    assert result["requests"] == 10
    assert result["seconds"] > 0.09
    assert result["load"] == "constant:100"


def test_what_fails_is_counted_and_told(server: Server) -> None:
    server.answers = [
        (200, "text/event-stream", STREAM),
        (503, "application/json", b'{"error": {"message": "full"}}'),
        (200, "text/event-stream", events({"error": {"message": "it broke"}})),
        (200, "application/json", b"[]"),
    ]
    result = heard(server.url, requests=4, concurrency=1)
    assert result["failed"] == 3
    assert any("503" in problem for problem in result["problems"])
    assert "it broke" in result["problems"]
    assert any("no text" in problem for problem in result["problems"])
    gone = heard("http://127.0.0.1:9", requests=2)
    assert gone["failed"] == 2
    assert gone["invalid"] == "nothing was heard"


def test_a_folder_of_sounds(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no sound") as raised:
        read_recordings(tmp_path)
    assert raised.value.param == "folder"
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "talk.wav").write_bytes(tone(0.5))
    (tmp_path / "deep" / "talk.txt").write_text("two words\n")
    (tmp_path / "other.wav").write_bytes(tone(0.25))
    found = {sound.name: (sound.seconds, sound.said) for sound in read_recordings(tmp_path)}
    assert found == {"deep/talk.wav": (0.5, "two words"), "other.wav": (0.25, None)}
    (tmp_path / "other.wav").write_bytes(b"RIFF")
    with pytest.raises(InvalidRequest, match="sound") as raised:
        read_recordings(tmp_path)
    assert raised.value.param == "other.wav"


async def speaking(socket: Any) -> None:
    """A session that guesses, changes its mind, and says the final text when it is quiet."""

    async def say(kind: str, **fields: Any) -> None:
        await socket.send(json.dumps({"type": kind, **fields}))

    assert json.loads(await socket.recv())["type"] == "session.update"
    await say("session.updated")
    item = "conversation.item.input_audio_transcription"
    number = 0
    async for message in socket:
        assert json.loads(message)["type"] == "input_audio_buffer.append"
        number += 1
        if number == 4:
            await say("input_audio_buffer.speech_started")
            await say(f"{item}.delta", delta="", unstable="the rain")
        elif number == 6:
            await say(f"{item}.delta", delta="the train", unstable="is")
        elif number == 12:
            await say(f"{item}.completed", transcript="the train is late")


def test_a_session_is_fed_in_its_own_time() -> None:
    sounds = [Recording("a.wav", tone(0.4, silence=0.2), 0.6, "the train is late")]

    async def both() -> dict[str, Any]:
        async with websockets.serve(speaking, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}"
            return await asyncio.to_thread(heard, url, live=True, sounds=sounds)

    result = asyncio.run(both())
    assert result["problems"] == []
    assert result["words"]["wrong"] == 0
    metrics = result["metrics"]
    # The fourth piece has been spoken 0.4 s after the begin, the tone begins at 0.2.
    assert metrics["first_partial_seconds"]["mean"] >= 0.2
    assert metrics["final_seconds"]["mean"] >= 0.6
    assert metrics["rewritten_words"]["mean"] == 1.0


class Words:
    """A tokenizer of which each word is a token."""

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=text.split())


def test_the_limit_is_the_sum_of_its_products() -> None:
    """Matrix by matrix, of a window of 30 s and one of 15 s: the encoder computes, the decoder
    reads."""
    arch = WhisperArch(64, 2, 3, 5, 40)
    files: Any = SimpleNamespace(arch=arch, frames=1500, tokenizer=Words())
    device = Hardware("some", {"float32": 1e6, "int8": 4e6}, 1e5, 2**30, kind="cpu")
    one = HeardSound(Recording("a.wav", b"", 45.0, None), 0.0, end=1.0, text="three small words")
    seconds = read = 0.0
    for positions, tokens in ((1500, 2.0), (750, 1.0)):
        # The convolutions stay wide, over frames and then over positions.
        wide = 2 * positions * 3 * 5 * 64 + positions * 3 * 64 * 64
        coded = 2 * positions * (4 * 64 * 64 + 2 * 64 * 256) + 3 * 2 * positions * 64 * 64
        # q · k, the softmax, and times v.
        attention = 2 * positions * positions * (4 * 64 + 5)
        seconds += 2 * wide / 1e6 + (2 * coded + attention) / 4e6
        # K and V, with a scale for each head, of the sound, and of the text up to a window's middle
        # token, which is written too; two rows of tables.
        text = round(tokens / 2) + 1
        read += tokens * (3 * 2 * (positions + text + 1) * 64 * (1 + 2 / 64) + 2 * 64 * 34 / 32)
    # A greedy head need not read its low bits.
    weights = 3 * (4 * 64 * 64 + 2 * 64 * 64 + 2 * 64 * 256) * 34 / 32 + 40 * 64 * 5.5 / 8
    for users in (1, 4):
        found = hearing_limit([one], files, device, users)
        assert found["encoder"] == pytest.approx(seconds)
        assert found["decoder"] == pytest.approx((read + 3 * weights / users) / 1e5)
        both = found["encoder"], found["decoder"]
        assert found["seconds"] == pytest.approx(sum(both) if users == 1 else max(both))
