"""The catalog's voices behind a real server, read back by Whisper base."""

from __future__ import annotations

import io
import re
import shutil
import time
import wave
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from processes import Running, headrace, running

from headrace.bench.word_errors import words
from headrace.engine.hearing.opening import open_transcriber
from headrace.media.audio import decode
from headrace.speech.decoding import DecodingOptions

pytest.importorskip("onnxruntime", reason="needs the extra programs: onnxruntime")
pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng"),
]
TEXT = "The water turns the wheel, and the wheel turns the mill. Seven boats pass before noon."


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(headrace("serve", "joe", "--programs", "kokoro", "--port", "0")) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.openai().with_options(timeout=300)


def heard(sound: bytes, language: str) -> str:
    options = DecodingOptions(language=language)
    transcriber = open_transcriber("whisper-base", 2, "int8")
    return str(transcriber.transcribe(decode(sound).samples, options).text)


def test_a_text_is_read_back(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "joe", "voice": "joe", "input": TEXT}
    more = {"seed": 3}
    whole = client.audio.speech.create(**given, response_format="wav", extra_body=more).content
    with wave.open(io.BytesIO(whole)) as file:
        assert file.getframerate() == 22_050
    assert words(heard(whole, "en")) == words(TEXT)
    with client.audio.speech.with_streaming_response.create(
        **given, response_format="pcm", extra_body=more
    ) as reply:
        parts = list(reply.iter_bytes(4096))
    assert b"".join(parts) == whole[44:]


def test_japanese_is_read_back(client: openai.OpenAI) -> None:
    text = "こんにちは。 きょう は いい てんき です ね。"
    made = client.audio.speech.create(
        model="kokoro", voice="jf_alpha", input=text, response_format="wav"
    )
    assert re.sub(r"\W", "", heard(made.content, "ja")).startswith("こんにちは今日はいい天気")


def test_who_leaves_ends_the_work(server: Running) -> None:
    body = {"model": "joe", "voice": "joe", "input": f"{TEXT} " * 40, "response_format": "pcm"}
    address = f"{server.url}/v1/audio/speech"
    with httpx.stream("POST", address, json=body, timeout=300) as reply:
        first = next(reply.iter_raw())
    assert np.frombuffer(first[: len(first) // 2 * 2], "<i2").any()
    for _ in range(1200):
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        (running_,) = re.findall(r"^headrace_programs_running (\S+)", text, re.MULTILINE)
        left = re.findall(r'program_jobs_total\{model_name="joe",outcome="left"\} (\S+)', text)
        if float(running_) == 0 and left == ["1.0"]:
            return
        time.sleep(0.05)
    raise AssertionError("the work goes on")
