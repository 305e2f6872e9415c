"""A server that speaks, by OpenAI's own client: forms, streams, and what goes wrong."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from processes import Running, headrace, running

from headrace.base.config import EngineOptions
from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.engine.clients.opening import open_for_serving
from headrace.kernels.cpu.library import Team
from headrace.speech.codec import Codec
from headrace.speech.voices import FrameReader, open_voices
from tiny.speaking import CODES, FIRST, PLACES, make

soundfile = pytest.importorskip("soundfile", reason="needs the extra audio")
TEXT = "The water turns the wheel."
FRAME_SECONDS = 2048 / 24_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("speaking"), context=1024)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(headrace("serve", str(folder), "--port", "0", "--threads", "2")) as one:
        yield one


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai()


def pcm(client: openai.OpenAI, **more: Any) -> np.ndarray[Any, Any]:
    given = {"seed": 5, "max_tokens": 70, **more}
    said = client.audio.speech.create(
        model="", input=TEXT, voice="tara", response_format="pcm", extra_body=given
    )
    return np.frombuffer(said.content, "<i2") / 32767


def test_files_in_every_form(client: openai.OpenAI) -> None:
    wanted = pcm(client)
    assert len(wanted) == 10 * 2048
    assert np.abs(wanted).max() > 0.01
    for form in ("wav", "flac", "mp3", "opus"):
        said = client.audio.speech.create(
            model="",
            input=TEXT,
            voice="tara",
            response_format=form,
            extra_body={"seed": 5, "max_tokens": 70},
        )
        assert said.response.headers["content-type"].startswith("audio/")
        samples, rate = soundfile.read(io.BytesIO(said.content))
        assert rate == 24_000
        if form in ("wav", "flac"):
            assert np.array_equal(np.rint(samples * 32768), np.rint(wanted * 32767))
        else:
            assert abs(len(samples) - len(wanted)) < 4_000


def test_the_same_seed_is_the_same_sound(client: openai.OpenAI) -> None:
    assert np.array_equal(pcm(client), pcm(client))
    assert not np.array_equal(pcm(client), pcm(client, seed=6))


def test_the_sound_is_that_of_the_tokens(client: openai.OpenAI, folder: Path) -> None:
    """The tokens by the route of texts, and the codec over all of them at once."""
    voices = open_voices(folder, FIRST + CODES * PLACES)
    prompt = voices.ids(lambda text: list(text.encode()), "tara", TEXT)
    said = client.completions.create(
        model="",
        prompt=prompt,
        max_tokens=70,
        temperature=0.8,
        top_p=0.95,
        seed=5,
        extra_body={"return_token_ids": True},
    )
    tokens = said.choices[0].token_ids  # type: ignore[attr-defined]
    frames = FrameReader(voices).take(tokens)
    assert len(frames) == 10
    whole = Codec(voices.codec, Team(1)).stream(5).push(frames, last=True)
    assert np.array_equal(np.rint(whole * 32767), np.rint(pcm(client) * 32767))


def test_sound_comes_before_the_model_ends(server: Running) -> None:
    """The first samples of a long sound are there in a fraction of its time."""
    body = {"input": TEXT, "voice": "leo", "response_format": "pcm", "seed": 1, "max_tokens": 900}
    begin = time.monotonic()
    first, total = 0.0, 0
    with httpx.stream("POST", server.url + "/v1/audio/speech", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        for part in reply.iter_raw():
            first = first or time.monotonic() - begin
            total += len(part)
    whole = time.monotonic() - begin
    assert total == 2 * 2048 * (900 // PLACES)
    assert first < 0.5 * whole


def test_events(client: openai.OpenAI) -> None:
    wanted = pcm(client)
    with client.audio.speech.with_streaming_response.create(
        model="",
        input=TEXT,
        voice="tara",
        response_format="pcm",
        stream_format="sse",
        extra_body={"seed": 5, "max_tokens": 70},
    ) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    sound = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert np.array_equal(np.frombuffer(sound, "<i2") / 32767, wanted)
    done = events[-1]
    assert done["type"] == "speech.audio.done"
    assert done["finish_reason"] == "length"
    assert done["usage"]["output_tokens"] == 70
    assert done["usage"]["input_tokens"] == len(f"tara: {TEXT}") + 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"voice": "nobody"}, "voice"),
        ({"input": ""}, "input"),
        ({"input": "   "}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"speed": 2.0}, "speed"),
        ({"instructions": "Whisper."}, "instructions"),
        ({"response_format": "aac"}, "response_format"),
        ({"stream_format": "json"}, "stream_format"),
        ({"temperature": -1.0}, "temperature"),
        ({"tempo": 1}, "tempo"),
    ],
)
def test_what_is_wrong_is_named(server: Running, change: dict[str, Any], field: str) -> None:
    body = {"input": TEXT, "voice": "tara", **change}
    reply = httpx.post(server.url + "/v1/audio/speech", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


def test_ordinary_speed_is_taken_and_metrics_count(server: Running) -> None:
    body = {"input": TEXT, "voice": "tara", "speed": 1, "max_tokens": 14, "instructions": ""}
    reply = httpx.post(server.url + "/v1/audio/speech", json=body)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "audio/mpeg"
    text = httpx.get(server.url + "/metrics").text
    (spoken,) = re.findall(r"headrace_spoken_seconds_total\{[^}]*\} (\S+)", text)
    assert float(spoken) > 0
    assert "headrace_first_sound_seconds_bucket" in text


def test_who_leaves_ends_the_work(server: Running) -> None:
    body = {"input": TEXT, "voice": "leo", "response_format": "pcm", "max_tokens": 900}
    with httpx.stream("POST", server.url + "/v1/audio/speech", json=body, timeout=60) as reply:
        next(reply.iter_raw())
    for _ in range(100):
        text = httpx.get(server.url + "/metrics").text
        (running_,) = re.findall(r"vllm:num_requests_running\{[^}]*\} (\S+)", text)
        if float(running_) == 0:
            return
        time.sleep(0.05)
    raise AssertionError("the model goes on")


def test_a_model_of_text_says_so(tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder / "speech.json").unlink()
    with running(headrace("serve", str(folder), "--port", "0", "--threads", "1")) as one:
        reply = httpx.post(one.url + "/v1/audio/speech", json={"input": "a", "voice": "b"})
        assert reply.status_code == 400
        assert "speech.json" in reply.json()["error"]["message"]


@pytest.mark.parametrize("broken", ["speech.json", "config"])
def test_what_is_broken_beside_the_weights_is_told_without_an_engine(
    tmp_path: Path, broken: str
) -> None:
    folder = make(tmp_path)
    opening = open_for_serving(EngineOptions(model=str(folder)), None, lambda files: None)
    if broken == "speech.json":
        (folder / "speech.json").write_text('{"codec": "nowhere"}')
    else:
        (folder / "snac" / "config.json").write_text("{}")
    with pytest.raises((ModelFileError, UnsupportedModel)):
        asyncio.run(opening)
