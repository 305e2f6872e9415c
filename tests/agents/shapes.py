"""Drives client libraries through their options, for `loops/record.py` to keep what they send.

`python shapes.py URL MODEL`, in the environment of the agents. What answers may be any server:
only the requests count, so errors of answers are not.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal

import anthropic
import langchain_openai
import litellm
import ollama
import openai
import pydantic_ai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field, SecretStr
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1], sys.argv[2]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is the weather in Paris?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "17 degrees"}
HISTORIES = (
    [USER],
    [SYSTEM, USER],
    [PARTS],
    [SYSTEM, USER, CALL, RESULT],
    [USER, CALL, RESULT, USER],
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "A city."},
        "days": {"type": "integer"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Get the weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": FUNCTION | {"strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}}


class Person(BaseModel):
    """A person."""

    name: str = Field(description="The name.", min_length=1)
    kind: Literal["friend", "foe"] = "friend"
    tags: list[str] = []
    born: int | None = None


class Account(BaseModel):
    owner: Person
    secret: SecretStr | None = None
    rate: float = Field(ge=0, le=1)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"temperature": 0.2, "top_p": 0.9, "seed": 1, "stop": ["x"]},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": [STRICT], "tool_choice": "required", "stream": True},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [STRICT], "response_format": FORMAT},
    {"response_format": FORMAT},
    {"response_format": {"type": "json_object"}},
    {"logprobs": True, "top_logprobs": 2, "n": 1},
    {"store": True, "metadata": {"a": "b"}, "user": "me"},
    {"reasoning_effort": "low", "verbosity": "low", "service_tier": "flex"},
    {"presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": -1}},
]
RESPONSE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"instructions": "Be brief.", "temperature": 0, "store": False},
    {"tools": [{"type": "function", **FUNCTION, "strict": True}], "parallel_tool_calls": False},
    {"text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}}},
    {"include": ["reasoning.encrypted_content"], "store": False, "reasoning": {"effort": "low"}},
    {"truncation": "auto", "metadata": {"a": "b"}, "text": {"verbosity": "low"}},
]
MESSAGE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
    {"tools": [{"name": "get_weather", "description": "d", "input_schema": SCHEMA}]},
    {
        "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
    {"temperature": 0.5, "top_k": 5, "stop_sequences": ["x"], "metadata": {"user_id": "me"}},
    {"thinking": {"type": "disabled"}},
]
BLOCKS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "get_weather",
                    "input": {"city": "P"},
                },
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "17"}],
        },
    ],
]


@tool
def get_weather(city: str, days: int = 1) -> str:
    """Get the weather."""
    return "17 degrees"


def requests() -> Iterator[Callable[[], object]]:
    """Yield senders of one request each."""
    sdk = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)
    for messages, options in itertools.product(HISTORIES, OPTIONS):
        given = {"model": MODEL, "messages": messages, "max_tokens": 8, **options}
        yield lambda given=given: list(sdk.chat.completions.create(**given))
        kinds = ("openai", "hosted_vllm") if messages in HISTORIES[3:] else ("openai",)
        for kind in kinds:
            named = given | {"model": f"{kind}/{MODEL}", "drop_params": True}
            yield lambda named=named: list(
                litellm.completion(**named, api_base=f"{URL}/v1", api_key="x", max_retries=0)
            )
    for given, options in itertools.product(("Hello", [USER], [PARTS]), RESPONSE_OPTIONS):
        if given == [PARTS]:
            given = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
        yield lambda given=given, options=options: sdk.responses.create(
            model=MODEL, input=given, max_output_tokens=16, **options
        )
    for prompt in ("Hello", ["a", "b"], [1, 2, 3]):
        for options in ({}, {"stream": True}, {"logprobs": 2, "echo": True}, {"stop": "x", "n": 1}):
            yield lambda prompt=prompt, options=options: sdk.completions.create(
                model=MODEL, prompt=prompt, max_tokens=4, **options
            )
    claude = anthropic.Anthropic(base_url=URL, api_key="x", max_retries=0)
    for messages, options in itertools.product(BLOCKS, MESSAGE_OPTIONS):
        yield lambda messages=messages, options=options: claude.messages.create(
            model=MODEL, messages=messages, max_tokens=8, **options
        )
    yield lambda: claude.messages.count_tokens(model=MODEL, messages=BLOCKS[0])
    chat = langchain_openai.ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key="x", max_tokens=8, max_retries=0
    )  # type: ignore[call-arg]
    talks = (
        [HumanMessage("Hello")],
        [SystemMessage("Be brief."), HumanMessage("Hello"), AIMessage("Hi"), HumanMessage("So?")],
        [
            HumanMessage("Weather?"),
            AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "P"}, "id": "1"}]),
            ToolMessage("17", tool_call_id="1"),
        ],
    )
    methods = ("function_calling", "json_mode", "json_schema")
    for messages in talks:
        yield lambda messages=messages: chat.invoke(messages)
        yield lambda messages=messages: list(chat.stream(messages))
        yield lambda messages=messages: chat.bind_tools([get_weather]).invoke(messages)
        yield lambda messages=messages: chat.bind_tools([get_weather], strict=True).invoke(messages)
        for model, method in itertools.product((Person, Account), methods):
            yield lambda messages=messages, model=model, method=method: chat.with_structured_output(
                model, method=method
            ).invoke(messages)
    provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="x")
    shapes = (
        str,
        Person,
        Account,
        pydantic_ai.NativeOutput(Person),
        pydantic_ai.PromptedOutput(Person),
    )
    for kind, shape in itertools.product((OpenAIChatModel, OpenAIResponsesModel), shapes):
        for tools in ((), (get_weather.func,)):
            agent: Any = pydantic_ai.Agent(
                kind(MODEL, provider=provider), output_type=shape, tools=tools, retries=0
            )  # type: ignore[call-overload]
            yield lambda agent=agent: agent.run_sync("Hello")
    local = ollama.Client(host=URL)
    for options in ({}, {"temperature": 0, "num_predict": 4, "num_ctx": 512}):
        for more in (
            {},
            {"stream": True},
            {"format": "json"},
            {"format": SCHEMA},
            {"tools": [TOOL]},
        ):
            yield lambda options=options, more=more: list(
                local.chat(MODEL, [USER], options=options, **more)
            )
        yield lambda options=options: local.generate(MODEL, "Hello", options=options)


for send in requests():
    with suppress(Exception):
        send()
