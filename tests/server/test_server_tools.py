"""Tool calls and reasoning in chat answers: whole, streamed, cut."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine
from test_server_shapes import CHAT, events

from headrace.server.app import create_app

TEMPLATE = "<tool_call> </tool_call> <think> </think>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
ANSWER = (
    "<think>They want the weather.</think>\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400} | more


async def ask(answer: str, *, path: str = CHAT, **more: Any) -> httpx.Response:
    engine = FakeEngine(answer=answer, template=TEMPLATE)
    engine.once = True
    app = create_app(engine)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, json=body(**more) if path == CHAT else more)


def assembled(chunks: list[Any]) -> dict[str, Any]:
    """Assemble the deltas as a client does."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            whole[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(whole["tool_calls"]):
                whole["tool_calls"].append(
                    {
                        "id": call["id"],
                        "type": call["type"],
                        "function": {"name": "", "arguments": ""},
                    }
                )
            function = whole["tool_calls"][call["index"]]["function"]
            for name, value in call["function"].items():
                function[name] += value
    return whole


async def test_tool_calls_whole() -> None:
    reply = (await ask(ANSWER, tools=TOOLS)).json()
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["reasoning_content"] == "They want the weather."
    assert message["content"] == "I look."
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in message["tool_calls"]
    ]
    assert calls == [("weather", {"city": "Bern", "days": 2}), ("time", {})]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert 20 < reply["usage"]["completion_tokens_details"]["reasoning_tokens"] < 40


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, {"n": 1, "return_token_ids": True}])
async def test_tool_calls_streamed_assemble_to_the_same(extra: dict[str, Any]) -> None:
    message = (await ask(ANSWER, tools=TOOLS)).json()["choices"][0]["message"]
    chunks = events(await ask(ANSWER, tools=TOOLS, stream=True, **extra))
    whole = assembled(chunks)
    assert whole["content"] == message["content"]
    assert whole["reasoning_content"] == message["reasoning_content"]
    assert [c["function"] for c in whole["tool_calls"]] == [
        c["function"] for c in message["tool_calls"]
    ]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["tool_calls"]


async def test_one_call_alone_where_no_more_are_wanted() -> None:
    """No grammar holds the answer under `auto`: what is behind the first call is left out."""
    asked = {"tools": TOOLS, "parallel_tool_calls": False}
    (call,) = (await ask(ANSWER, **asked)).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    whole = assembled(events(await ask(ANSWER, stream=True, **asked)))
    (streamed,) = whole["tool_calls"]
    assert streamed["function"] == call["function"]
    twice = ANSWER + ANSWER.partition("look.")[2]
    reply = (await ask(twice, tools=TOOLS)).json()
    names = [each["function"]["name"] for each in reply["choices"][0]["message"]["tool_calls"]]
    assert names == ["weather", "time"] * 2, "equal calls are two calls"
    old = {"functions": [tool["function"] for tool in TOOLS]}
    whole_old = (await ask(ANSWER, **old)).json()["choices"][0]["message"]
    assert whole_old["function_call"]["name"] == "weather"
    deltas = [
        chunk["choices"][0]["delta"].get("function_call", {})
        for chunk in events(await ask(ANSWER, stream=True, **old))
    ]
    assert [each["name"] for each in deltas if "name" in each] == ["weather"]
    text = "".join(each.get("arguments", "") for each in deltas)
    assert json.loads(text) == {"city": "Bern", "days": 2}


BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2'


@pytest.mark.parametrize(
    ("answer", "reason", "arguments", "content"),
    [
        (BROKEN, "tool_calls", {"city": "Bern", "days": 2}, None),
        (BROKEN + ",}}\n</tool_call>", "tool_calls", {"city": "Bern", "days": 2}, None),
        (BROKEN + " oops}}\n</tool_call>", "tool_calls", {"city": "Bern", "days": 2}, None),
        (BROKEN[:-23], "stop", None, BROKEN[:-23]),
    ],
)
async def test_arguments_are_json_or_the_call_is_content(
    answer: str, reason: str, arguments: dict[str, Any] | None, content: str | None
) -> None:
    choice = (await ask(answer, tools=TOOLS)).json()["choices"][0]
    chunks = events(await ask(answer, tools=TOOLS, stream=True))
    assert [choice["finish_reason"], chunks[-1]["choices"][0]["finish_reason"]] == [reason] * 2
    for message in (choice["message"], assembled(chunks)):
        calls = [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        assert calls == ([] if arguments is None else [arguments])
        assert (message["content"] or None) == content


async def test_a_call_that_breaks_off_in_every_interface() -> None:
    """The same arguments, whole and streamed, and the end of a turn that calls."""
    expected = {"city": "Bern", "days": 2}
    function = TOOLS[0]["function"]
    anthropic = {
        "path": "/v1/messages",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "weather", "input_schema": function["parameters"]}],
    }
    reply = (await ask(BROKEN, **anthropic)).json()
    assert [block["input"] for block in reply["content"]] == [expected]
    assert reply["stop_reason"] == "tool_use"
    told = (await ask(BROKEN, **anthropic, stream=True)).text
    parts = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
    deltas = [part["delta"].get("partial_json", "") for part in parts if "delta" in part]
    assert json.loads("".join(deltas)) == expected

    responses = {
        "path": "/v1/responses",
        "input": "hi",
        "tools": [{"type": "function", **function}],
    }
    reply = (await ask(BROKEN, **responses)).json()
    assert [json.loads(item["arguments"]) for item in reply["output"]] == [expected]
    assert [item["status"] for item in reply["output"]] == ["completed"]
    assert reply["status"] == "completed"
    told = (await ask(BROKEN, **responses, stream=True)).text
    parts = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
    deltas = [p["delta"] for p in parts if p["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == expected

    ollama = {
        "path": "/api/chat",
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
    }
    for stream in (False, True):
        lines = (await ask(BROKEN, **ollama, stream=stream)).text.splitlines()
        found = [json.loads(line)["message"].get("tool_calls", ()) for line in lines]
        assert [c["function"]["arguments"] for calls in found for c in calls] == [expected]


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, {"n": 2}])
@pytest.mark.parametrize("most", [3, 70, 110, 400])
@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_the_chunk_with_the_end_has_nothing_else(
    tools: Any, most: int, extra: dict[str, Any]
) -> None:
    """What is flushed with the end comes in a chunk before, in text as in calls."""
    for answer in (ANSWER, "Hello", BROKEN):
        asked = {"tools": tools, "max_tokens": most, "stream": True} | extra
        chunks = events(await ask(answer, **asked))
        last = [one["choices"][0] for one in chunks if one["choices"][0]["finish_reason"]]
        assert len(last) == extra.get("n", 1)
        assert [one["delta"] for one in last] == [{}] * len(last)


async def test_a_call_that_is_cut_says_length() -> None:
    choice = (await ask(ANSWER, tools=TOOLS, max_tokens=110)).json()["choices"][0]
    assert choice["finish_reason"] == "length"


async def test_without_tools_a_call_is_text() -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = (await ask(ANSWER, **more)).json()["choices"][0]["message"]
        assert "<tool_call>" in message["content"]
        assert "tool_calls" not in message
        assert message["reasoning_content"]


async def test_reasoning_may_be_left_out() -> None:
    reply = (await ask(ANSWER, tools=TOOLS, include_reasoning=False)).json()
    assert "reasoning_content" not in reply["choices"][0]["message"]
    chunks = events(await ask(ANSWER, include_reasoning=False, stream=True))
    assert assembled(chunks)["reasoning_content"] == ""


async def test_required_tools_need_an_engine_that_holds_a_form() -> None:
    reply = await ask(ANSWER, tools=TOOLS, tool_choice="required")
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("written", "reasoning"),
    [
        ("<think>\nThey want", "the weather."),
        ([{"type": "text", "text": "<think>They "}], "the weather."),
        ("<think>They</think> I look", None),
        ("I look at <thin", None),
    ],
)
async def test_an_answer_that_goes_on_in_the_midst_of_its_reasoning(
    written: Any, reasoning: str | None, stream: bool
) -> None:
    """The prompt ends inside reasoning: so does what comes first, until the mark."""
    rest = "the weather.</think>\nI look." if reasoning else "the weather. I look."
    messages = [
        {"role": "user", "content": "What is <think> for?"},
        {"role": "assistant", "content": written},
    ]
    reply = await ask(rest, messages=messages, continue_final_message=True, stream=stream)
    if stream:
        message = assembled(events(reply))
        message["reasoning_content"] = message["reasoning_content"] or None
    else:
        message = reply.json()["choices"][0]["message"]
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == ("I look." if reasoning else rest)


NAMED = {
    "tool_use": "<tool_call> <function= <parameter= </parameter> </function> </tool_call>",
    "rag": "<think> </think>",
}


async def test_calls_are_read_by_the_template_that_wrote_the_prompt() -> None:
    """The default template knows neither calls nor reasoning."""
    call = "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n"
    engine = FakeEngine(answer=f"I look.\n{call}</tool_call>", template="plain")
    engine.files = replace(engine.files, named_templates=NAMED)
    engine.once = True
    app = create_app(engine)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        told = (await client.post(CHAT, json=body(tools=TOOLS))).json()["choices"][0]["message"]
        assert told["content"] == "I look."
        assert told["tool_calls"][0]["function"] == {
            "name": "weather",
            "arguments": '{"city": "Bern"}',
        }
        engine.answer = "<think>Hm.</think>Yes."
        documents = [{"text": "words"}]
        for more, reasoning in (({}, None), ({"documents": documents}, "Hm.")):
            told = (await client.post(CHAT, json=body(**more))).json()["choices"][0]["message"]
            assert told.get("reasoning_content") == reasoning
