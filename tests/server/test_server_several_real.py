"""The default model, SmolLM2, MiniLM and Whisper in one server: answers of servers of their own."""

from __future__ import annotations

import io
import os
import signal
import threading
import wave
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
from processes import Running, headrace, running

pytestmark = pytest.mark.model

CHATS = ("qwen2.5-coder-0.5b", "smollm2-135m")
VECTORS, EARS = "all-minilm-l6-v2", "whisper-base"
MODELS = (*CHATS, VECTORS, EARS)
FLAGS = ("--port", "0", "--max-sequences", "8")
QUESTIONS = ("What is the capital of France?", "Write a haiku about rivers.")
TEXTS = ["The wheel turns.", "A river has two banks.", "def add(a, b): return a + b"]


def hum() -> bytes:
    """Eight seconds of a voice without words."""
    t = np.arange(16_000 * 8) / 16_000
    samples = 0.3 * np.sin(2 * np.pi * (200 + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return held.getvalue()


def ask(client: openai.OpenAI, model: str) -> list[Any]:
    if model == EARS:
        reply = client.audio.transcriptions.create(
            model=model, file=("hum.wav", hum()), response_format="verbose_json", language="en"
        )
        return [reply.text, [one.tokens for one in reply.segments or ()]]
    if model == VECTORS:
        reply = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        return [one.embedding for one in reply.data]
    return [
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=32,
            temperature=0,
        )
        .choices[0]
        .message.content
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Any]]:
    found = {}
    for model in MODELS:
        flags = FLAGS[:2] if model == EARS else FLAGS
        with running(headrace("serve", model, *flags)) as server:
            found[model] = ask(server.openai(), model)
    return found


@pytest.fixture(scope="module")
def server() -> Any:
    with running(headrace("serve", *MODELS, *FLAGS)) as server:
        yield server


def all_at_once(server: Running) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}

    def work(model: str) -> None:
        found[model] = ask(server.openai(), model)

    threads = [threading.Thread(target=work, args=(model,)) for model in MODELS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_at_once_as_alone(server: Running, alone: dict[str, list[Any]]) -> None:
    assert all_at_once(server) == alone
    assert "Paris" in alone[CHATS[0]][0]


def test_after_its_engine_was_killed(server: Running, alone: dict[str, list[Any]]) -> None:
    """Requests of which nothing was seen are answered by the next engine; later ones come again."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = [one for one in below if "headrace.engine.process" in " ".join(one.cmdline())]
    found: dict[str, list[Any]] = {}
    threads = [
        threading.Thread(
            target=lambda name=model: found.update({name: ask(server.openai(max_retries=30), name)})
        )
        for model in MODELS
    ]
    for thread in threads:
        thread.start()
    while not httpx.get(f"{server.url}/load").json()["server_load"]:
        pass
    os.kill(engine.pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert found == alone
