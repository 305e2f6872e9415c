"""No body makes the server fail: random JSON, and valid bodies with random changes."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.server.app import create_app

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "y"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "z"},
        ],
        "max_tokens": 3,
        "temperature": 1,
        "n": 2,
        "stop": ["a"],
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "logit_bias": {"5": 1},
        "seed": 3,
        "response_format": {"type": "text"},
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/completions": {
        "prompt": ["a", "b"],
        "max_tokens": 2,
        "logprobs": 1,
        "echo": True,
        "n": 1,
        "prompt_logprobs": 1,
        "stop_token_ids": [3],
        "stream": False,
        "best_of": 1,
    },
    "/v1/messages": {
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "stream": True,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "max_output_tokens": 3,
        "stream": True,
        "store": True,
        "text": {"format": {"type": "text"}},
        "tools": [{"type": "function", "name": "f"}],
        "reasoning": {"effort": "low"},
    },
    "/tokenize": {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/invocations": {"prompt": [1, 2], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
}

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([-1, 0, 1e308, 2**63, 2**64, 10**30, "", "\x00", "auto", "required"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path]
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in items:
            found += places(child, (*path, key))
    return found


def changed(value: Any, path: tuple[Any, ...], change: Any, how: str) -> Any:
    if not path:
        return change
    value = copy.deepcopy(value)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if how == "remove":
        del holder[path[-1]]
    elif how == "add" and isinstance(holder, dict):
        holder[str(change)[:20]] = change
    else:
        holder[path[-1]] = change
    return value


class Running:
    """One application and one loop for all examples: making them costs more than a request."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.engine = FakeEngine(template="<tool_call> </tool_call> <think> </think>")
        self.app: Any = self.runner.run(self._make())

    async def _make(self) -> Any:
        return create_app(self.engine, ServerOptions(max_body=100_000))  # type: ignore[arg-type]

    def post(self, path: str, content: bytes) -> httpx.Response:
        reply = self.runner.run(self._post(path, content))
        assert self.app.state.service.in_work == 0
        assert not self.engine.running
        return reply

    async def _post(self, path: str, content: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app)
        headers = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=content, headers=headers)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running()
    yield running
    running.app.state.store.close()
    running.runner.close()


def check(reply: httpx.Response) -> None:
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        assert reply.json()["error"]["message"]
        assert len(reply.content) < 4000


@pytest.mark.parametrize("path", VALID)
def test_the_valid_bodies_are_valid(server: Running, path: str) -> None:
    assert server.post(path, json.dumps(VALID[path]).encode()).status_code == 200


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(sorted(VALID)), data=st.data())
def test_changed_bodies_never_fail_the_server(
    server: Running, path: str, data: st.DataObject
) -> None:
    body: Any = VALID[path]
    for _ in range(data.draw(st.integers(1, 3))):
        if not isinstance(body, dict | list):
            break
        place = data.draw(st.sampled_from(places(body)))
        how = data.draw(st.sampled_from(["replace", "remove", "add"]))
        body = changed(body, place, data.draw(JSON), how)
    check(server.post(path, json.dumps(body).encode()))


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(sorted(VALID)), content=st.binary(max_size=200))
def test_bytes_never_fail_the_server(server: Running, path: str, content: bytes) -> None:
    check(server.post(path, content))
