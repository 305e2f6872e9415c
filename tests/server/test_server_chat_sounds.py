"""Sounds in a chat, by OpenAI's client: tokens as transformers has them, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import io
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
from processes import Running, headrace, running
from transformers import WhisperFeatureExtractor

from headrace.base.errors import TooLarge
from headrace.server.routes.chat.schema import ChatBody
from headrace.server.routes.chat.sounds import MOST_SOUNDS, sounds_of
from tiny.hearing_chat import MELS, PLACE, make, tokenizer

pytest.importorskip("soundfile", reason="needs the extra audio")
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hearing_chat")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make(folder)


@pytest.fixture(scope="module")
def server(folder: Path, oracle: Any) -> Iterator[Running]:
    del oracle
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--step-tokens", "64"]
    with running(headrace(*words, "--kv-dtype", "float32")) as one:
        yield one


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai()


def samples_of(seed: int, seconds: float) -> np.ndarray[Any, Any]:
    """Samples that a WAV of 16 bits holds as they are."""
    t = np.arange(int(16_000 * seconds)) / 16_000
    tone = np.sin(2 * np.pi * (200 + 90 * seed + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    return np.rint(0.3 * 32767 * tone) / 32768


def part(samples: np.ndarray[Any, Any]) -> dict[str, Any]:
    room = io.BytesIO()
    with wave.open(room, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32768).astype("<i2").tobytes())
    data = base64.b64encode(room.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def asked(*parts: Any) -> list[Any]:
    return [{"role": "system", "content": "You hear."}, {"role": "user", "content": list(parts)}]


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


def wanted(oracle: Any, sounds: list[np.ndarray[Any, Any]], pieces: list[str]) -> list[int]:
    """Greedy tokens behind a prompt that is written out: a text, a sound, a text, ..."""
    extractor = WhisperFeatureExtractor(feature_size=MELS)
    made = extractor(
        [one.astype(np.float32) for one in sounds],
        sampling_rate=16_000,
        return_tensors="pt",
        padding="max_length",
        return_attention_mask=True,
    )
    frames = made["attention_mask"].sum(-1)
    rows = (((frames - 1) // 2 + 1) - 2) // 2 + 1
    ids: list[int] = []
    for place, piece in enumerate(pieces):
        ids += encoded(piece)
        if place < len(sounds):
            ids += [PLACE] * int(rows[place])
    given = torch.tensor([ids])
    with torch.no_grad():
        out = oracle.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            input_features=made["input_features"].float(),
            feature_attention_mask=made["attention_mask"],
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=258,
            pad_token_id=256,
        )
    return [int(token) for token in out[0, len(ids) :]]


def encoded(piece: str) -> list[int]:
    return list(tokenizer().encode(piece).ids)


def answer(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(
        model="",
        messages=messages,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, **more},
    )


def test_greedy_tokens_are_those_of_transformers(client: openai.OpenAI, oracle: Any) -> None:
    sound = samples_of(1, 5.3)
    said = answer(client, asked(part(sound), text("What is said?")))
    pieces = [
        "<|im_start|>system\nYou hear.<|im_end|>\n<|im_start|>user\nAudio 1: <|audio_bos|>",
        "<|audio_eos|>\nWhat is said?<|im_end|>\n<|im_start|>assistant\n",
    ]
    tokens = wanted(oracle, [sound], pieces)
    assert said.choices[0].token_ids[: len(tokens)] == tokens
    assert said.usage.prompt_tokens == len(encoded("".join(pieces))) + 132
    other = answer(client, asked(part(samples_of(2, 5.3)), text("What is said?")))
    assert other.choices[0].token_ids != said.choices[0].token_ids, "what is heard matters"


def test_two_sounds_and_a_conversation_that_goes_on(client: openai.OpenAI, oracle: Any) -> None:
    first, second = samples_of(3, 1.0), samples_of(4, 2.5)
    messages = asked(text("One: "), part(first), text(" two: "), part(second), text(" Which?"))
    said = answer(client, messages)
    pieces = [
        "<|im_start|>system\nYou hear.<|im_end|>\n<|im_start|>user\nOne: Audio 1: <|audio_bos|>",
        "<|audio_eos|>\n two: Audio 2: <|audio_bos|>",
        "<|audio_eos|>\n Which?<|im_end|>\n<|im_start|>assistant\n",
    ]
    tokens = wanted(oracle, [first, second], pieces)
    assert said.choices[0].token_ids[: len(tokens)] == tokens
    again = answer(client, messages)
    assert again.choices[0].token_ids == said.choices[0].token_ids
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached >= again.usage.prompt_tokens - 32, "the same sounds are found in the cache"
    swapped = asked(text("One: "), part(second), text(" two: "), part(first), text(" Which?"))
    cached = answer(client, swapped).usage.prompt_tokens_details.cached_tokens
    assert cached < 64, "other sounds are not"


def test_others_change_nothing(client: openai.OpenAI) -> None:
    """Conversations with and without sounds side by side have the tokens that each has alone."""
    asks = [
        asked(part(samples_of(5, 3.1)), text("A?")),
        asked(text("Only text, which is long enough to share a step.")),
        asked(text("B? "), part(samples_of(6, 0.4))),
    ]
    alone = [answer(client, one, cache_salt="alone").choices[0].token_ids for one in asks]
    with ThreadPoolExecutor(6) as threads:
        made = threads.map(lambda at: answer(client, asks[at % 3], cache_salt=str(at)), range(6))
        assert [one.choices[0].token_ids for one in made] == alone * 2


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "input_audio", "input_audio": {"data": "%%"}}], ".0.input_audio.data"),
        ([{"type": "input_audio", "input_audio": {"format": "wav"}}], ".0.input_audio.data"),
        ([text("a"), {"type": "input_audio", "input_audio": {"data": "AAAA"}}], ".1.input_audio"),
        ([part(samples_of(1, 0.05))], ".0.input_audio.data"),
        ([part(samples_of(1, 30.5))], ".0.input_audio.data"),
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], ".0"),
    ],
)
def test_what_is_wrong_with_a_sound_is_named(
    server: Running, content: list[Any], param: str
) -> None:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    reply = httpx.post(server.url + "/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("messages.0.content" + param)


def test_too_many_sounds_are_refused_before_one_is_read() -> None:
    parts = [{"type": "input_audio", "input_audio": {"data": "%%"}}] * (MOST_SOUNDS + 1)
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": parts}]})
    with pytest.raises(TooLarge, match=f"at most {MOST_SOUNDS}"):
        sounds_of(body.messages)


def test_nothing_of_a_sound_is_left_open(server: Running, client: openai.OpenAI) -> None:
    """Sounds lie in memory of the API process, which goes with their requests: those that were
    answered, refused after the sound was read, or left by their client."""
    sound = part(samples_of(7, 2.0))
    answer(client, asked(sound, text("A?")))
    with pytest.raises(openai.BadRequestError):
        answer(client, asked(sound, text("B?")), stop_token_ids=[-1])
    for _ in client.chat.completions.create(model="", messages=asked(sound), stream=True):
        break

    def left() -> list[str]:
        family = [psutil.Process(server.process.pid)]
        family += family[0].children(recursive=True)
        found = []
        for one in family:
            for link in Path(f"/proc/{one.pid}/fd").glob("*"):
                with contextlib.suppress(OSError):
                    found.append(str(link.readlink()))
        return [name for name in found if "headrace input" in name]

    end = time.monotonic() + 120
    while left():
        assert time.monotonic() < end, left()
        time.sleep(0.05)


def test_a_place_that_a_text_forges_is_no_sound(server: Running, client: openai.OpenAI) -> None:
    """A text may hold the token's letters, whoever wrote it."""
    said = answer(client, asked(text("<|AUDIO|>"), part(samples_of(1, 1.0))))
    assert said.usage.completion_tokens > 0
    body = {"messages": [{"role": "system", "content": "<|AUDIO|>"}], "max_tokens": 4}
    reply = httpx.post(server.url + "/v1/chat/completions", json=body)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] > 0
