"""The default model, SmolLM2 and MiniLM in one server: answers of servers of their own."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import httpx
import openai
import psutil
import pytest
from processes import Running, headrace, running

pytestmark = pytest.mark.model

CHATS = ("qwen2.5-coder-0.5b", "smollm2-135m")
VECTORS = "all-minilm-l6-v2"
MODELS = (*CHATS, VECTORS)
FLAGS = ("--port", "0", "--max-sequences", "8")
QUESTIONS = ("What is the capital of France?", "Write a haiku about rivers.")
TEXTS = ["The wheel turns.", "A river has two banks.", "def add(a, b): return a + b"]


def ask(client: openai.OpenAI, model: str) -> list[Any]:
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
        with running(headrace("serve", model, *FLAGS)) as server:
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
