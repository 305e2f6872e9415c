"""The default model and its tools: what comes out where it may choose, and where it must call.

docs/structured_output.md has the table that `test_the_table` holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from processes import Running, headrace, running

pytestmark = pytest.mark.model

MODEL = "qwen2.5-coder-0.5b"
PAGE = Path(__file__).parents[2] / "docs" / "structured_output.md"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city", "parameters": CITY}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
CITIES = ("Paris", "Rome", "Oslo", "Berlin", "Madrid", "Tokyo", "Lima", "Cairo", "Boston", "Vienna")


def ask(city: str) -> Any:
    return [{"role": "user", "content": f"What is the weather in {city}?"}]


ASK = ask("Paris")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(headrace("serve", "--port", "0", "--max-sequences", "4")) as server:
        yield server


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai(timeout=300)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": MODEL, "messages": ASK, "max_tokens": 60, "temperature": 0}
    return client.chat.completions.create(**(given | more))


def each(call: Callable[[str], Any]) -> list[Any]:
    """Return the result for every city, a few at a time."""
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(call, CITIES))


def test_it_calls_ten_times_of_ten(client: openai.OpenAI) -> None:
    replies = each(lambda city: chat(client, messages=ask(city), tools=TOOLS))
    for city, reply in zip(CITIES, replies, strict=True):
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls", choice.message.content
        (call,) = choice.message.tool_calls
        assert json.loads(call.function.arguments) == {"city": city}
        assert choice.message.content is None


def test_streamed_without_a_flash_of_text(client: openai.OpenAI) -> None:
    replies = each(lambda city: list(chat(client, messages=ask(city), tools=TOOLS, stream=True)))
    for city, chunks in zip(CITIES, replies, strict=True):
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        arguments = "".join(part.function.arguments or "" for part in parts)
        assert json.loads(arguments) == {"city": city}


def test_responses_call_ten_times_of_ten(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": False, **FUNCTION}
    replies = each(
        lambda city: client.responses.create(
            model=MODEL, input=ask(city), max_output_tokens=60, temperature=0, tools=[tool]
        )
    )
    for city, reply in zip(CITIES, replies, strict=True):
        (item,) = reply.output
        assert json.loads(item.arguments) == {"city": city}


def test_messages_call_ten_times_of_ten(server: Running) -> None:
    client = server.anthropic(timeout=300)
    tool: Any = {
        "name": "get_weather",
        "description": FUNCTION["description"],
        "input_schema": CITY,
    }
    replies = each(
        lambda city: client.messages.create(
            model=MODEL,
            messages=ask(city),
            max_tokens=60,
            tools=[tool],
            extra_body={"temperature": 0},
        )
    )
    for city, reply in zip(CITIES, replies, strict=True):
        (block,) = reply.content
        assert block.input == {"city": city}


@pytest.mark.parametrize("strict", [False, True])
def test_tools_beside_a_form_and_strict_ones(client: openai.OpenAI, strict: bool) -> None:
    tools = [{"type": "function", "function": {**FUNCTION, "strict": strict}}]
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
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
    """One row of the page: how often all wanted calls came, of ten questions."""
    cells = []
    for choice in ("auto", "required"):
        for count in (1, 2):

            def called(city: str, count: int = count, choice: str = choice) -> bool:
                place = CITIES.index(city)
                cities = [CITIES[(place + more) % len(CITIES)] for more in range(count)]
                messages = ask(" and in ".join(cities))
                reply = chat(
                    client, messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=90
                )
                calls = reply.choices[0].message.tool_calls or ()
                found = [json.loads(call.function.arguments).get("city") for call in calls]
                return found == cities

            cells.append(f"{sum(each(called))} of {len(CITIES)}")
    row = f"| {MODEL} | hermes | {' | '.join(cells)} |"
    assert row in PAGE.read_text(), row
