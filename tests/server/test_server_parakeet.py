"""A Parakeet behind the route that Whisper has, by OpenAI's own client."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest
from processes import Running, headrace, running

from headrace.engine.hearing.opening import open_transcriber
from headrace.media import decode
from tiny.parakeet import make

pytest.importorskip("soundfile", reason="needs the extra audio")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("parakeet")
    make("parakeet_tdt", where)
    return where


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--dtype", "float32"]
    with running(headrace(*words)) as one:
        yield one


@pytest.fixture(scope="module")
def talk() -> bytes:
    t = np.arange(16_000 * 8) / 16_000
    samples = 0.3 * np.sin(2 * np.pi * (300 + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return held.getvalue()


def test_files_and_streams(server: Running, folder: Path, talk: bytes) -> None:
    client = server.openai()
    wanted = open_transcriber(str(folder), 2, "exact").transcribe(decode(talk).samples, words=True)
    assert len(wanted.text) > 10
    file = ("talk.wav", talk)
    said = client.audio.transcriptions.create(
        model="", file=file, response_format="verbose_json", timestamp_granularities=["word"]
    )
    assert said.text == wanted.text
    words = [word for one in wanted.segments for word in one.words]
    assert [one.word for one in said.words or ()] == [one.text.strip() for one in words]
    assert [one.start for one in said.words or ()] == [one.start for one in words]
    plain = client.audio.transcriptions.create(model="", file=file, include=["logprobs"])
    assert plain.text == wanted.text
    heard = b"".join(bytes(map(int, one.bytes or ())) for one in plain.logprobs or ())
    assert heard.decode().strip() == wanted.text
    events = list(client.audio.transcriptions.create(model="", file=file, stream=True))
    assert events[-1].text == wanted.text  # type: ignore[union-attr]
    srt = client.audio.transcriptions.create(model="", file=file, response_format="srt")
    assert srt.startswith("1\n00:00:0")


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # The client's own.
def test_what_it_cannot_be_asked_is_named(server: Running, talk: bytes) -> None:
    client = server.openai()
    file = ("talk.wav", talk)
    with pytest.raises(openai.BadRequestError, match="does not translate"):
        client.audio.translations.create(model="", file=file)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        client.audio.transcriptions.create(model="", file=file, prompt="A name.")
    with pytest.raises(openai.BadRequestError, match="language"):
        client.audio.transcriptions.create(model="", file=file, language="de")
