"""Everything a client can get wrong in a body has its own typed answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.base.errors import EngineFault, InvalidRequest, Overloaded

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


CHAT_MISTAKES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_value"),
    ({"messages": [{"role": "oracle", "content": "x"}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        "messages.0.content.0.type",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0",
        "unsupported_content",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
        "invalid_value",
    ),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "missing_required_parameter"),
    ({"temperature": "warm"}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": 1e300}, "temperature", "invalid_value"),
    ({"top_p": -0.1}, "top_p", "invalid_value"),
    ({"top_k": -7}, "top_k", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 100_000}, "n", "invalid_value"),
    ({"n": 10**40}, "n", "invalid_value"),
    ({"n": 1.5}, "n", "invalid_value"),
    ({"seed": 2**64}, "seed", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -5}, "max_tokens", "invalid_value"),
    ({"max_tokens": 100_000}, "max_tokens", "context_length_exceeded"),
    ({"min_tokens": 9}, "min_tokens", "invalid_value"),
    ({"stop": ["a"] * 1000}, "stop", "invalid_value"),
    ({"stop": ["x" * 1025]}, "stop", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 1000}}, "logit_bias", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 50}, "top_logprobs", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (
        {"stream": True, "stream_options": {"colour": 1}},
        "stream_options.colour",
        "unknown_parameter",
    ),
    ({"colour": "blue"}, "colour", "unknown_parameter"),
    ({"temprature": 0.5}, "temprature", "unknown_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {}}, "audio", "unsupported_parameter"),
    ({"model": "another"}, "model", "model_not_found"),
    ({"tool_choice": "required"}, "tools", "invalid_value"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools.0.function.name",
        "invalid_value",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "a"}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "b"}}],
                },
            },
        },
        "tool_choice",
        "invalid_value",
    ),
    ({"guided_regex": "[a-z", "temperature": 0}, "guided.regex", "invalid_grammar"),
    (
        {"guided_regex": "a", "structured_outputs": {"regex": "b"}},
        "structured_outputs",
        "invalid_value",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    ({"request_id": "no spaces"}, "request_id", "invalid_value"),
    ({"priority": 2**40}, "priority", "invalid_value"),
]


@pytest.mark.parametrize(("change", "param", "code"), CHAT_MISTAKES, ids=lambda v: str(v)[:60])
async def test_a_wrong_chat_body_names_its_field(
    client: httpx.AsyncClient, change: dict[str, Any], param: str, code: str | None
) -> None:
    reply = await client.post(CHAT, json=HELLO | change)
    error = error_of(reply, 404 if param == "model" else 400)
    assert error["param"] == param
    assert error["code"] == code
    assert len(error["message"]) < 1000


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.0"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 600}, "prompt"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": True}, "logprobs"),
        ({"prompt": "x", "logprobs": 99}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
async def test_a_wrong_completion_body_names_its_field(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    assert error_of(await client.post(TEXT, json=body), 400)["param"] == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"messages": "\xc3\x28"}',
        b'{"messages": "\\ud800"}',
        b"[" * 10_000,
        b'{"a":' * 9_000,
        b'{"n": ' + b"9" * 20_000 + b"}",
        b'{"temperature": NaN, "messages": []}',
        b'{"temperature": 1e999, "messages": []}',
        b"\x00" * 100,
    ],
    ids=lambda data: str(data[:12]),
)
async def test_a_body_that_is_no_json_object(client: httpx.AsyncClient, data: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in (CHAT, TEXT):
        error_of(await client.post(path, content=data, headers=headers), 400)


async def test_only_json_content_types_are_taken(client: httpx.AsyncClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        reply = await client.post(CHAT, content=b"{}", headers={"content-type": kind})
        assert error_of(reply, 415)["code"] == "unsupported_media_type"
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    reply = await client.post(
        CHAT, content=httpx.Request("POST", "/", json=HELLO).content, headers=headers
    )
    assert reply.status_code == 200


async def test_a_large_body_is_refused_by_its_announcement(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 200_000}]}
    assert error_of(await client.post(CHAT, json=body), 413)["code"] == "request_too_large"


async def test_a_large_body_without_length_is_refused_while_it_comes(
    client: httpx.AsyncClient,
) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        for _ in range(1000):
            sent += 10_000
            yield b" " * 10_000

    reply = await client.post(CHAT, content=endless(), headers={"content-type": "application/json"})
    error_of(reply, 413)


async def test_inert_fields_change_nothing(client: httpx.AsyncClient) -> None:
    extra = {
        "user": "me",
        "metadata": {"a": 1},
        "service_tier": "auto",
        "store": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    reply = await client.post(CHAT, json=HELLO | extra)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "Hell"


async def test_a_budget_for_reasoning_needs_marks(client: httpx.AsyncClient) -> None:
    refused = error_of(await client.post(CHAT, json=HELLO | {"thinking_token_budget": 9}), 400)
    assert refused["param"] == "thinking_token_budget"


async def test_every_sampling_field_arrives(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 11,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
    }
    body = (
        HELLO
        | fields
        | {"stop": "END", "logit_bias": {"7": -3}, "logprobs": True, "top_logprobs": 2}
    )
    assert (await client.post(CHAT, json=body)).status_code == 200
    _, sampling = engine.seen[-1]
    for name, value in fields.items():
        assert getattr(sampling, name) == value, name
    assert sampling.stop == ["END"]
    assert sampling.logit_bias == {7: -3.0}
    assert (sampling.logprobs, sampling.max_tokens) == (2, 4)


async def test_the_models_own_sampling_is_the_default(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.files.generation.update(temperature=0.7, top_k=20)
    await client.post(CHAT, json=HELLO | {"top_k": 5})
    # The defaults were read when the engine was attached.
    assert engine.seen[-1][1].temperature == 1.0
    assert engine.seen[-1][1].top_k == 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Overloaded("full", retry_after=7.2), 503),
        (InvalidRequest("no", param="x"), 400),
        (EngineFault("a step failed"), 500),
    ],
)
async def test_an_engines_refusal_keeps_its_status(
    client: httpx.AsyncClient, engine: FakeEngine, error: Any, status: int, stream: bool
) -> None:
    engine.refusal = error
    reply = await client.post(CHAT, json=HELLO | {"stream": stream})
    assert error_of(reply, status)["message"] == error.message
    assert reply.headers.get("retry-after") == ("8" if status == 503 else None)


async def test_what_does_not_exist(client: httpx.AsyncClient) -> None:
    error_of(await client.get("/nothing"), 404)
    error_of(await client.get(CHAT), 405)
    error_of(await client.get("/v1/models/other"), 404)
