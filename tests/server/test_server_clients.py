"""LangChain and Anthropic's client against a real server: chat, tools, forms, streams, errors.

OpenAI's own client is in test_server_openai, test_server_structured and test_server_responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from processes import Running, headrace, running, serving
from pydantic import BaseModel, Field
from test_server_structured import speaking

langchain = pytest.importorskip("langchain_openai")

pytestmark = pytest.mark.slow

QUESTION = "Where does the water go?"


class Place(BaseModel):
    """A place that water flows to."""

    kind: str = Field(pattern="^(sea|lake)$")
    depth: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = speaking(tmp_path_factory.mktemp("models") / "tiny")
    # Slow enough that an answer comes in parts.
    with serving(model, "--max-sequences 8 --kv-memory 16MiB --kernels ref") as server:
        yield server


def chain(server: Running, **more: Any) -> Any:
    given: dict[str, Any] = {
        "model": "tiny",
        "base_url": server.url + "/v1",
        "api_key": "none",
        "max_retries": 0,
        "max_tokens": 12,
        "temperature": 0,
        "timeout": 60,
    }
    return langchain.ChatOpenAI(**(given | more))


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_whole_and_streamed_agree(server: Running, responses: bool) -> None:
    model = chain(server, use_responses_api=responses)
    whole = model.invoke(QUESTION)
    assert whole.text
    assert whole.usage_metadata["output_tokens"] == 12
    parts = list(model.stream(QUESTION))
    assert "".join(part.text for part in parts) == whole.text
    assert len(parts) > 1


async def test_langchain_batches(server: Running) -> None:
    asks = [f"{QUESTION} {place}" for place in range(12)]
    replies = await chain(server).abatch(asks)
    assert [reply.text for reply in replies] == [
        (await chain(server).ainvoke(ask)).text for ask in asks
    ]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(server: Running, method: str) -> None:
    model = chain(server, temperature=1.2, seed=3, max_tokens=300)
    found = model.with_structured_output(Place, method=method, strict=True).invoke(QUESTION)
    assert isinstance(found, Place)


def test_langchain_tools(server: Running) -> None:
    model = chain(server, temperature=1.0, seed=4, max_tokens=300)
    bound = model.bind_tools([Place], tool_choice="any", strict=True, parallel_tool_calls=False)
    reply = bound.invoke(QUESTION)
    (call,) = reply.tool_calls
    assert call["name"] == "Place"
    Place.model_validate(call["args"])
    whole = None
    for part in bound.stream(QUESTION):
        whole = part if whole is None else whole + part
    assert whole is not None
    assert [(x["name"], x["args"]) for x in whole.tool_calls] == [(call["name"], call["args"])]
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "It goes to the sea."}
    question = {"role": "user", "content": QUESTION}
    assert model.invoke([question, reply, answer], max_tokens=5).text


def test_langchain_errors(server: Running) -> None:
    import openai

    with pytest.raises(openai.NotFoundError):
        chain(server, model="other").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        chain(server, top_p=5).invoke(QUESTION)
    with pytest.raises(Exception, match="context") as caught:
        chain(server).invoke(QUESTION * 400)
    assert isinstance(caught.value, openai.BadRequestError)


def test_anthropics_client_with_tools(server: Running) -> None:
    client = server.anthropic()
    given: Any = {
        "model": "tiny",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [
            {
                "name": "place",
                "strict": True,
                "input_schema": {
                    "type": "object",
                    "properties": {"depth": {"type": "integer", "maximum": 50, "minimum": 0}},
                    "required": ["depth"],
                    "additionalProperties": False,
                },
            }
        ],
        "tool_choice": {"type": "tool", "name": "place", "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**given)
    (use,) = [block for block in whole.content if block.type == "tool_use"]
    assert whole.stop_reason == "tool_use"
    assert 0 <= use.input["depth"] <= 50  # type: ignore[index]
    with client.messages.stream(**given) as stream:
        partial = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert [block.input for block in final.content if block.type == "tool_use"] == [use.input]
    assert partial
    given["messages"] += [
        {"role": "assistant", "content": [use.model_dump(exclude_none=True)]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": json.dumps({"at": "sea"})}
            ],
        },
    ]
    again = client.messages.create(**given | {"tool_choice": {"type": "none"}, "max_tokens": 5})
    assert again.usage.output_tokens == 5


def test_anthropics_client_sees_typed_errors(server: Running) -> None:
    client = server.anthropic()
    given: Any = {"model": "tiny", "max_tokens": 5}
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**given, messages=[])
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**given, messages=[{"role": "user", "content": QUESTION * 400}])


@pytest.mark.model
def test_langchain_on_the_default_model() -> None:
    with running(headrace("serve", "--port", "0", "--max-sequences", "4")) as server:
        model = chain(server, model="qwen2.5-coder-0.5b", max_tokens=60)
        assert "Paris" in model.invoke("What is the capital of France?").text

        class Country(BaseModel):
            country: str
            capital: str

        found = model.with_structured_output(Country, method="json_schema", strict=True).invoke(
            "What is the capital of France?"
        )
        assert found.capital == "Paris"
