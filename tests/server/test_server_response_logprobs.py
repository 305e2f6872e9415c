"""Log-probabilities of a response's text, by OpenAI's client: the tokens are those of the text."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from server_fake import FakeEngine

from headrace.server.app import create_app

TEMPLATE = "<tool_call> </tool_call> <think> </think>"
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
WANTED: Any = ["message.output_text.logprobs"]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def client_of(answer: str) -> openai.AsyncOpenAI:
    engine = FakeEngine(answer=answer, template=TEMPLATE)
    engine.once = True
    transport = httpx.ASGITransport(app=create_app(engine))  # type: ignore[arg-type]
    http = httpx.AsyncClient(transport=transport, base_url="http://test")
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="x", max_retries=0, http_client=http
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("Hello there.", "Hello there."),
        ("<think>ab ab</think>\n\nab <b>!", "ab <b>!"),
        ("One <tool_ x. " + CALL, "One <tool_ x."),
        ("Grüße ☃.", "Grüße ☃."),
        (CALL, None),
    ],
)
async def test_the_tokens_of_the_text(answer: str, text: str | None) -> None:
    client = client_of(answer)
    asked: dict[str, Any] = {
        "model": "fake",
        "input": "hi",
        "include": WANTED,
        "top_logprobs": 2,
        "tools": [TOOL],
    }
    whole = await client.responses.create(**asked)
    parts: list[Any] = [
        part for item in whole.output if item.type == "message" for part in item.content
    ]
    if text is None:
        assert not parts
        return
    (part,) = parts
    if text.isascii():  # The engine that stands in writes one byte as one character.
        assert part.text == text
        assert "".join(entry.token for entry in part.logprobs) == text
    assert len(part.logprobs) == len(text.encode())
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    streamed, done = [], None
    async for event in await client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            streamed += event.logprobs
        if event.type == "response.output_text.done":
            done = event.logprobs
    assert [each.token for each in streamed] == [each.token for each in part.logprobs]
    assert done is not None
    assert len(done) == len(streamed)


async def test_only_where_they_are_wanted() -> None:
    client = client_of("Hello")
    plain: Any = await client.responses.create(model="fake", input="hi")
    assert plain.output[0].content[0].logprobs == []
    bare: Any = await client.responses.create(model="fake", input="hi", include=WANTED)
    entries = bare.output[0].content[0].logprobs
    assert [(entry.token, entry.top_logprobs) for entry in entries[:2]] == [("H", []), ("e", [])]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="fake", input="hi", top_logprobs=21)
    assert caught.value.param == "top_logprobs"
