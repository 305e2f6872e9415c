"""The default model and its tools: what comes out where it may choose, and where it must call.

docs/structured_output.md has the table that `test_the_table` holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from processes import Running, headrace, running

pytestmark = pytest.mark.model

MODEL = "qwen2.5-coder-0.5b"
PAGE = Path(__file__).parents[2] / "docs" / "structured_output.md"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city", "parameters": CITY}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
TIMES = 10


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(headrace("serve", "--port", "0", "--max-sequences", "4")) as server:
        yield server


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=300)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": MODEL, "messages": ASK, "max_tokens": 60, "temperature": 0}
    return client.chat.completions.create(**(given | more))


def drawn(place: int) -> dict[str, Any]:
    """Greedy once, then drawn."""
    return {"temperature": 0.7 if place else 0.0, "seed": place}


def test_it_calls_ten_times_of_ten(client: openai.OpenAI) -> None:
    for place in range(TIMES):
        choice = chat(client, tools=TOOLS, **drawn(place)).choices[0]
        assert choice.finish_reason == "tool_calls", choice.message.content
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        assert not choice.message.content


def test_streamed_without_a_flash_of_text(client: openai.OpenAI) -> None:
    for place in range(TIMES):
        chunks = list(chat(client, tools=TOOLS, stream=True, **drawn(place)))
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        arguments = "".join(part.function.arguments or "" for part in parts)
        assert json.loads(arguments) == {"city": "Paris"}


def test_responses_and_messages(client: openai.OpenAI, server: Running) -> None:
    other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300)
    for place in range(TIMES):
        temperature = drawn(place)["temperature"]
        response: Any = client.responses.create(
            model=MODEL, input=ASK, max_output_tokens=60, temperature=temperature,
            tools=[{"type": "function", "strict": False, **FUNCTION}],  # type: ignore[list-item]
            extra_body={"seed": place},
        )  # fmt: skip
        assert [item.type for item in response.output] == ["function_call"]
        tool: Any = {"name": "get_weather", "description": FUNCTION["description"],
                     "input_schema": CITY}  # fmt: skip
        reply = other.messages.create(
            model=MODEL, messages=ASK, max_tokens=60, temperature=temperature, tools=[tool]
        )
        assert reply.stop_reason == "tool_use"


@pytest.mark.parametrize("strict", [False, True])
def test_tools_beside_a_form_and_strict_ones(client: openai.OpenAI, strict: bool) -> None:
    tools = [{"type": "function", "function": {**FUNCTION, "strict": strict}}]
    schema = {"type": "object", "properties": {"answer": {"type": "string"}},
              "required": ["answer"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True}}  # fmt: skip
    called = chat(client, tools=tools, response_format=form).choices[0]
    assert json.loads(called.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    hello = [{"role": "user", "content": "Just say hello as JSON with a key answer."}]
    said = chat(client, tools=tools, response_format=form, messages=hello).choices[0]
    if not said.message.tool_calls:
        assert set(json.loads(said.message.content)) == {"answer"}
    free = chat(client, tools=tools).choices[0]
    assert json.loads(free.message.tool_calls[0].function.arguments) == {"city": "Paris"}


def test_an_agents_loop_ends_with_the_right_result(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Use a tool once, then tell the user what it said."},
        *ASK,
    ]
    results = []
    for turn in range(4):
        choice = "auto" if turn == 0 else "none"
        message = (
            chat(client, messages=messages, tools=TOOLS, tool_choice=choice).choices[0].message
        )
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            results.append(json.loads(call.function.arguments)["city"])
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 23 degrees."}
            )
    assert results == ["Paris"]
    assert re.search("sunny|23", messages[-1]["content"], re.IGNORECASE)


def test_the_table(client: openai.OpenAI) -> None:
    """One row of the page: how often the wanted calls came, of the times asked."""
    both: Any = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
    cells = []
    for choice in ("auto", "required"):
        for messages, cities in ((ASK, {"Paris"}), (both, {"Paris", "Rome"})):
            hits = 0
            for place in range(TIMES):
                reply = chat(
                    client, messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=90,
                    **drawn(place),
                )  # fmt: skip
                calls = reply.choices[0].message.tool_calls or ()
                found = set()
                for call in calls:
                    try:
                        found.add(json.loads(call.function.arguments).get("city"))
                    except ValueError:
                        continue
                hits += found >= cities
            cells.append(f"{hits} of {TIMES}")
    row = f"| {MODEL} | hermes | {' | '.join(cells)} |"
    print(row)
    assert row in PAGE.read_text(), row
