"""Tokens, NIM's management routes, KServe's health, SageMaker's pair."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.engine.clients.face import Health

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    reply = await client.post("/tokenize", json={"prompt": "añb", "return_token_strs": True})
    body = reply.json()
    assert body["tokens"] == list("añb".encode())
    assert body["count"] == 4
    assert body["max_model_len"] == 512
    assert body["token_strs"][0] == "a"
    back = await client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "añb"}


async def test_tokenize_messages_is_what_chat_computes(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    tokens = (await client.post("/tokenize", json={"messages": MESSAGES})).json()["tokens"]
    await client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1})
    assert engine.seen[-1][0] == tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [5000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/invocations", {}, "messages"),
        ("/invocations", {"messages": []}, "messages"),
        ("/invocations", {"prompt": {}}, "prompt"),
    ],
)
async def test_mistakes(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    reply = await client.post(path, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_invocations_is_a_chat_or_a_completion(client: httpx.AsyncClient) -> None:
    chat = await client.post("/invocations", json={"messages": MESSAGES, "max_tokens": 2})
    assert chat.json()["object"] == "chat.completion"
    text = await client.post("/invocations", json={"prompt": "a", "max_tokens": 2})
    assert text.json()["object"] == "text_completion"
    for data in (b"{", b"[" * 5_000, b"\xff"):
        headers = {"content-type": "application/json"}
        reply = await client.post("/invocations", content=data, headers=headers)
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "invalid_json"


async def test_nim(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/version")).json()["release"]
    metadata = (await client.get("/v1/metadata")).json()
    assert metadata["modelInfo"][0]["shortName"] == "fake"
    assert metadata["selectedModelProfileId"].startswith("fp_")
    manifest = (await client.get("/v1/manifest")).json()
    assert manifest["profile"]["decisions"]["kernels"] == {"value": "fake", "reason": "a test"}
    assert (await client.get("/v1/license")).json()["model"] == "fake"
    assert "headrace_http_requests_total" in (await client.get("/v1/metrics")).text


async def test_kserve_and_ping(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    paths = ["/v2/health/live", "/v2/health/ready", "/v2/models/fake/ready", "/ping"]
    assert [(await client.get(path)).status_code for path in paths] == [200] * 4
    assert (await client.get("/v2")).json()["name"] == "headrace"
    assert (await client.get("/v2/models/fake")).json()["name"] == "fake"
    assert (await client.get("/v2/models/other")).status_code == 404
    assert (await client.get("/v2/models/other/ready")).status_code == 404
    engine.state = Health(ready=False, alive=True, reason="restarting")
    assert [(await client.get(path)).status_code for path in paths] == [200, 503, 503, 503]


async def test_vllms_questions(client: httpx.AsyncClient) -> None:
    assert (await client.get("/load")).json() == {"server_load": 0}
    info = (await client.get("/server_info")).json()
    assert info["profile"]["decisions"]["kernels"]["value"] == "fake"
    tokenizer = (await client.get("/tokenizer_info")).json()
    assert (tokenizer["vocab_size"], tokenizer["model_max_length"]) == (1000, 512)
