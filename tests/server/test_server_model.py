"""Real models behind the server: answers that a person would accept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from processes import Running, headrace, running

pytestmark = pytest.mark.model


MODELS = ("qwen2.5-coder-0.5b", "smollm2-135m")


@pytest.fixture(scope="module", params=MODELS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    command = headrace("serve", request.param, "--port", "0", "--max-sequences", "8")
    with running(command) as server:
        yield server


def ask(server: Running, content: str, **more: Any) -> str:
    client = server.openai()
    (model,) = client.models.list()
    reply = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": content}],
        max_tokens=64,
        temperature=0,
        **more,
    )
    return reply.choices[0].message.content or ""


@pytest.mark.parametrize("server", MODELS[:1], indirect=True)
def test_it_knows_what_a_person_knows(server: Running) -> None:
    assert "Paris" in ask(server, "What is the capital of France?")
    assert "def " in ask(server, "Write a Python function that adds two numbers.")
    assert ask(server, "Was ist die Hauptstadt von Deutschland?").count("Berlin")


def test_text_in_other_scripts_is_never_cut_inside_a_character(server: Running) -> None:
    text = ask(server, "用中文写一句关于河流的话。")
    assert text
    assert "\ufffd" not in text
