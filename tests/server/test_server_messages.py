"""Anthropic's interface: shapes with known words, and the official client against a server."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from processes import Running, serving
from server_fake import FakeEngine, FakeTokenizer
from test_server_tools import ANSWER, TEMPLATE

from headrace.base.errors import EngineFault
from headrace.engine.clients.input import InputProcessor
from headrace.server.app import create_app
from headrace.server.routes.chat.schema import ChatBody
from headrace.server.routes.completions.schema import CompletionBody
from headrace.server.routes.messages.schema import MessagesBody
from tiny import talker
from tiny.kept import Kept

PATH = "/v1/messages"
TOOLS = [
    {"name": "weather", "input_schema": {"type": "object"}},
    {"name": "time", "description": "Now", "input_schema": {"type": "object"}},
]


def body(**more: Any) -> dict[str, Any]:
    return {"max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]} | more


async def ask(answer: str = "Hello", path: str = PATH, **more: Any) -> httpx.Response:
    engine = FakeEngine(answer=answer, template=TEMPLATE)
    engine.once = True
    engine.fault = more.pop("fault", None)
    engine.fault_after = 3
    engine.delay = 0.005 if engine.fault else 0
    transport = httpx.ASGITransport(app=create_app(engine))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        given = body(**more)
        if path != PATH:
            del given["max_tokens"]
        return await client.post(path, json=given)


class MarkTokenizer(FakeTokenizer):
    """The marks of reasoning are tokens of their own."""

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        most: int | None = None,
        unbroken: int | None = None,
    ) -> list[int]:
        marks = {"<think>": [300], "</think>": [301]}
        return marks.get(text) or super().encode(text, special=special, add_bos=add_bos)


@pytest.mark.parametrize(
    ("thinking", "single", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, True, 2000),
        ({"type": "enabled", "budget_tokens": 2000}, False, None),
        ({"type": "enabled"}, True, None),
        ({"type": "disabled", "budget_tokens": 2000}, True, None),
        (None, True, None),
    ],
)
async def test_the_budget_of_thinking(
    thinking: dict[str, Any] | None, single: bool, budget: int | None
) -> None:
    engine = FakeEngine(template=TEMPLATE)
    if single:
        engine.tokenizer = MarkTokenizer()
        engine._input = InputProcessor(engine.files, engine.tokenizer, engine.max_context)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=create_app(engine))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post(PATH, json=body(thinking=thinking))
        assert reply.status_code == 200, reply.text
        ((_, sampling),) = engine.seen
        assert sampling.thinking_token_budget == budget
        wrong = {"type": "enabled", "budget_tokens": 0}
        reply = await client.post(PATH, json=body(thinking=wrong))
        assert reply.status_code == 400
        assert "thinking.budget_tokens" in reply.json()["error"]["message"]


def events(reply: httpx.Response) -> list[Any]:
    found = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


async def test_text() -> None:
    reply = (await ask()).json()
    assert reply["type"] == "message"
    assert reply["content"] == [{"type": "text", "text": "Hello"}]
    assert reply["stop_reason"] == "end_turn"
    usage = reply["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] + 3 == len("<user>hi")
    assert usage["output_tokens"] == 5
    assert (await ask(max_tokens=2)).json()["stop_reason"] == "max_tokens"


async def test_thinking_text_and_tools_whole_and_streamed() -> None:
    whole = (await ask(ANSWER, tools=TOOLS)).json()
    assert [block["type"] for block in whole["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert whole["content"][2]["input"] == {"city": "Bern", "days": 2}
    assert whole["stop_reason"] == "tool_use"
    found = events(await ask(ANSWER, tools=TOOLS, stream=True))
    assert found[0]["type"] == "message_start"
    assert found[-1]["type"] == "message_stop"
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    blocks: list[dict[str, Any]] = []
    open_block = None
    for event in found[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
                assert open_block == len(blocks)
                blocks.append({**event["content_block"], "partial": ""})
            case "content_block_delta":
                assert event["index"] == open_block
                delta = event["delta"]
                for source, target in (
                    ("text", "text"),
                    ("thinking", "thinking"),
                    ("partial_json", "partial"),
                ):
                    if source in delta:
                        blocks[-1][target] += delta[source]
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    assert open_block is None
    for block, expected in zip(blocks, whole["content"], strict=True):
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
            block.pop("id")
            expected = {k: v for k, v in expected.items() if k != "id"}
        assert block == expected


async def test_the_conversation_reaches_the_template() -> None:
    engine = FakeEngine()
    seen: list[Any] = []
    engine.template.render_small = lambda messages, **more: seen.append((messages, more)) or "x"
    transport = httpx.ASGITransport(app=create_app(engine))  # type: ignore[arg-type]
    given = body(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        tools=TOOLS,
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "Rain"}],
                    },
                    {"type": "text", "text": "Thanks."},
                ],
            },
        ],
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post(PATH, json=given)).status_code == 200
    messages, more = seen[0]
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
    ]
    assert messages[2]["reasoning_content"] == "hm"
    assert messages[2]["tool_calls"][0]["function"]["name"] == "weather"
    assert messages[3] == {"role": "tool", "tool_call_id": "t1", "content": "Rain"}
    assert [tool["function"]["name"] for tool in more["tools"]] == ["weather", "time"]


MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


async def retained(**more: Any) -> tuple[dict[str, Any], int]:
    """(usage, tokens of the prompt) of a conversation with marks."""
    reply = await ask(**more)
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return usage, sum(usage[part] for part in parts)


async def test_marks_say_what_is_created_in_the_cache() -> None:
    user = [{"type": "text", "text": "a long document", **MARK}]
    usage, whole = await retained(messages=[{"role": "user", "content": user}])
    assert usage["cache_creation"]["ephemeral_5m_input_tokens"] == whole - 3
    assert usage["input_tokens"] == 0

    system = [{"type": "text", "text": "Be brief.", **HOUR}]
    question = [{"role": "user", "content": "Hi"}]
    usage, whole = await retained(system=system, messages=question)
    created = usage["cache_creation"]["ephemeral_1h_input_tokens"]
    assert len("Be brief.") <= created < whole - 3
    assert usage["cache_creation_input_tokens"] == created

    usage, whole = await retained(system=system, messages=[{"role": "user", "content": user}])
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] == created
    assert usage["cache_creation_input_tokens"] == whole - 3

    usage, whole = await retained(messages=question)
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] == whole - 3, "what the engine had cached"


ASKED = {"role": "user", "content": "What is the capital of France?"}
TEXT = {"type": "text", "text": "Par"}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "Rain"}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}


@pytest.mark.parametrize("path", [PATH, PATH + "/count_tokens"])
@pytest.mark.parametrize(
    ("written", "prompt"),
    [
        ("Par", "<user>What is the capital of France?<assistant>Par"),
        ([TEXT, {"type": "text", "text": "is"} | MARK], "<assistant>Paris"),
        ([THOUGHT, TEXT], "<assistant>Par"),
        ("", "<user>What is the capital of France?"),
        ([], "<user>What is the capital of France?"),
    ],
)
async def test_the_answer_continues_a_last_message_of_the_assistant(
    written: Any, prompt: str, path: str
) -> None:
    engine = FakeEngine(answer="is.", template=TEMPLATE)
    engine.once = True
    seen: list[str] = []
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text, **more: seen.append(text) or encode(text, **more)  # type: ignore[method-assign]
    transport = httpx.ASGITransport(app=create_app(engine))  # type: ignore[arg-type]
    given = body(messages=[ASKED, {"role": "assistant", "content": written}])
    if path != PATH:
        del given["max_tokens"]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post(path, json=given)
    assert reply.status_code == 200, reply.text
    assert seen[-1].endswith(prompt)
    if path == PATH:
        assert reply.json()["content"] == [{"type": "text", "text": "is."}]


async def test_a_mark_inside_earlier_turns_of_the_assistant() -> None:
    """The conversation up to there is no beginning of an answer."""
    turn = {"role": "assistant", "content": [TEXT | MARK, USE]}
    usage, whole = await retained(messages=[ASKED, turn, {"role": "user", "content": [RESULT]}])
    assert 0 < usage["cache_creation_input_tokens"] < whole


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content.0.text"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"colour": 1}, "colour"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": [ASKED, {"role": "assistant", "content": "Par "}]}, "messages.1"),
        ({"messages": [ASKED, {"role": "assistant", "content": [TEXT, USE]}]}, "tool_result"),
        ({"messages": [ASKED, {"role": "assistant", "content": [RESULT]}]}, "tool_result"),
        ({"messages": [ASKED, {"role": "assistant", "content": [THOUGHT]}]}, "thinking"),
        (
            {
                "messages": [ASKED, {"role": "assistant", "content": "{"}],
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "output_config",
        ),
    ],
    ids=str,
)
async def test_errors_have_anthropics_shape(change: dict[str, Any], words: str) -> None:
    reply = await ask(**change)
    assert reply.status_code == 400
    value = reply.json()
    assert value["type"] == "error"
    assert value["error"]["type"] == "invalid_request_error"
    assert words in value["error"]["message"]


async def test_an_error_in_the_middle_is_an_event() -> None:
    found = events(await ask(stream=True, fault=EngineFault("a step failed")))
    assert found[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "a step failed"},
    }


async def test_count_tokens() -> None:
    reply = await ask(path=PATH + "/count_tokens")
    assert reply.json() == {"input_tokens": len("<user>hi")}


def test_every_parameter_of_the_official_clients_is_known() -> None:
    http = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for create, schema in (
        (openai.resources.chat.completions.Completions.create, ChatBody),
        (openai.resources.completions.Completions.create, CompletionBody),
        (anthropic.resources.messages.Messages.create, MessagesBody),
    ):
        asked = set(inspect.signature(create).parameters) - http
        assert asked <= set(schema.model_fields), asked - set(schema.model_fields)


@pytest.fixture(scope="module")
def server(kept: Kept) -> Iterator[Running]:
    model = kept(talker.make)
    with serving(model, "--max-sequences 4 --kv-memory 8MiB") as server:
        yield server


@pytest.mark.slow
def test_the_official_client(server: Running) -> None:
    client = server.anthropic()
    given: Any = {
        "model": "tiny",
        "max_tokens": 12,
        "messages": [{"role": "user", "content": "Where does the water go?"}],
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**given)
    assert whole.content[0].text  # type: ignore[union-attr]
    assert whole.usage.output_tokens == 12
    with client.messages.stream(**given) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model="tiny", messages=given["messages"])
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**given | {"model": "other"})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**given | {"max_tokens": 10_000})
