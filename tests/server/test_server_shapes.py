"""The shapes of answers, field by field, with an engine whose words are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.base.drafted import Drafted, Verified
from headrace.base.errors import EngineFault
from headrace.engine.clients.face import Health

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def events(reply: httpx.Response) -> list[Any]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks[-1] == ""
    assert all(block.startswith("data: ") for block in blocks[:-1])
    assert blocks[-2] == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks[:-2]]


async def test_chat(client: httpx.AsyncClient) -> None:
    reply = await client.post(CHAT, json=HELLO | {"n": 2, "model": "fake"})
    body = reply.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake"
    assert body["system_fingerprint"].startswith("fp_")
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice in body["choices"]:
        assert choice["message"] == {"role": "assistant", "content": "Hell", "refusal": None}
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 8,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize(
    ("content", "accepted", "rejected"),
    [
        ("Hell", 4, 0),
        ("Help!", 3, 1),  # Of five tokens the limit of four lets four be expected.
        ([{"type": "text", "text": "He"}, {"type": "text", "text": "ll"}], 4, 0),
        ("12345", 0, 4),
    ],
    ids=str,
)
async def test_chat_counts_what_was_expected(
    client: httpx.AsyncClient, content: Any, accepted: int, rejected: int
) -> None:
    """Usage says what the answer kept of a prediction, whether anybody drafted from it or not."""
    body = HELLO | {"n": 2, "prediction": {"type": "content", "content": content}}
    wanted = {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 2 * accepted,
        "rejected_prediction_tokens": 2 * rejected,
    }
    reply = (await client.post(CHAT, json=body)).json()
    assert reply["usage"]["completion_tokens_details"] == wanted
    assert {choice["message"]["content"] for choice in reply["choices"]} == {"Hell"}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    usage = events(await client.post(CHAT, json=body | options))[-1]["usage"]
    assert usage["completion_tokens_details"] == wanted


@pytest.mark.parametrize(("path", "prompts"), [(CHAT, 1), (TEXT, 1), (TEXT, 2)])
async def test_an_answer_says_what_came_of_its_drafts(
    engine: FakeEngine, client: httpx.AsyncClient, path: str, prompts: int
) -> None:
    """Under vLLM's names, whole and streamed, over all prompts; nothing where none were verified,
    and usage is the same."""
    body = HELLO if path == CHAT else {"prompt": ["hi"] * prompts, "max_tokens": 4}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    plain = (await client.post(path, json=body)).json()
    assert "metrics" not in plain
    engine.drafted = Drafted()
    for one in Verified("suffix", 4, 3, 0.004, 0.03), Verified("ngram", 2, 0, 0.002, 0.0):
        engine.drafted.add(one)
    reply = (await client.post(path, json=body)).json()
    last = events(await client.post(path, json=body | streamed))[-1]
    assert reply["metrics"] == last["metrics"]
    assert reply["usage"] == last["usage"] == plain["usage"]
    told = reply["metrics"]["speculative_decoding"]
    assert told["num_spec_steps"] == 2 * prompts
    assert told["num_draft_tokens"] == 6 * prompts
    assert told["num_accepted_draft_tokens"] == 3 * prompts
    assert told["draft_acceptance_rate"] == 0.5
    assert told["mean_acceptance_length"] == 2.5
    assert told["acceptance_histogram"] == [prompts, 0, 0, prompts]
    assert told["num_spec_tokens"] == 4
    assert told["drafters"]["suffix"]["num_accepted_tokens"] == 3 * prompts
    assert told["saved_seconds"] == pytest.approx(0.03 * prompts)
    assert told["vain_seconds"] == pytest.approx(0.003 * prompts)


@pytest.mark.parametrize(
    ("prediction", "where"),
    [
        ("Hell", "prediction"),
        ({"type": "text", "content": "Hell"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 4}, "prediction.content"),
    ],
    ids=str,
)
async def test_a_prediction_that_is_none(
    client: httpx.AsyncClient, prediction: Any, where: str
) -> None:
    reply = await client.post(CHAT, json=HELLO | {"prediction": prediction})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(where)


async def test_chat_logprobs_have_bytes(client: httpx.AsyncClient) -> None:
    body = HELLO | {"logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    content = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "H",
            "logprob": -0.5,
            "bytes": [72],
            "top_logprobs": [
                {"token": "A", "logprob": -33.5, "bytes": [65]},
                {"token": "B", "logprob": -34.0, "bytes": [66]},
            ],
        }
    ]


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, {"return_token_ids": True}], ids=str)
async def test_chat_stream_concatenates(client: httpx.AsyncClient, extra: dict[str, Any]) -> None:
    options = {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
    chunks = events(await client.post(CHAT, json=HELLO | options | extra))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert all("usage" not in chunk for chunk in chunks[:-1])
    for index in range(2):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hell"
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        if extra.get("logprobs"):
            tokens = [e["token"] for c in own if c["logprobs"] for e in c["logprobs"]["content"]]
            assert "".join(tokens) == "Hell"
        if extra.get("return_token_ids"):
            assert [t for c in own for t in c.get("token_ids", ())] == list(b"Hell")


async def test_continuous_usage(client: httpx.AsyncClient) -> None:
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = events(await client.post(CHAT, json=HELLO | options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_completion_of_many_prompts(client: httpx.AsyncClient) -> None:
    for prompt in (["a", "bc"], [[1], [2, 3]]):
        reply = await client.post(TEXT, json={"prompt": prompt, "max_tokens": 2, "n": 2})
        body = reply.json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert all(choice["text"] == "He" for choice in body["choices"])
        assert body["usage"]["prompt_tokens"] == 3
        assert body["usage"]["completion_tokens"] == 8
        streamed = events(
            await client.post(
                TEXT, json={"prompt": prompt, "max_tokens": 2, "n": 2, "stream": True}
            )
        )
        for index in range(4):
            own = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in own) == "He"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(client: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1, "stream": stream}
    reply = await client.post(TEXT, json=body)
    if stream:
        parts = [chunk["choices"][0] for chunk in events(reply)]
        text = "".join(part["text"] for part in parts)
        logprobs = {
            name: [value for part in parts for value in part["logprobs"][name]]
            for name in parts[0]["logprobs"]
        }
    else:
        choice = reply.json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "abcHe"
    assert logprobs["tokens"] == list("abcHe")
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["top_logprobs"][0] is None
    assert set(logprobs["top_logprobs"][1]) == {"B", "b"}


async def test_echo_without_a_token_scores_the_prompt(client: httpx.AsyncClient) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    reply = (await client.post(TEXT, json=body)).json()
    assert reply["choices"][0]["text"] == "abc"
    assert reply["choices"][0]["logprobs"]["tokens"] == list("abc")
    assert reply["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_in_vllms_shape(client: httpx.AsyncClient) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 1}
    reply = (await client.post(TEXT, json=body)).json()
    assert reply["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "66": {"logprob": -0.1, "rank": 1, "decoded_token": "B"},
            "98": {"logprob": -1.0, "rank": 2, "decoded_token": "b"},
        },
    ]


async def test_a_fault_in_the_middle_is_an_event(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.fault, engine.fault_after, engine.delay = EngineFault("a step failed"), 2, 0.01
    reply = await client.post(CHAT, json=HELLO | {"stream": True})
    assert reply.status_code == 200
    last = events(reply)[-1]
    assert last["error"]["message"] == "a step failed"
    reply = await client.post(CHAT, json=HELLO)
    assert reply.status_code == 500


async def test_a_fault_before_the_first_token_has_its_status(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.fault = EngineFault("a step failed")
    reply = await client.post(CHAT, json=HELLO | {"stream": True})
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_fault"


async def test_a_bug_shows_nothing_of_its_inside(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise RuntimeError("secret path")

    engine.template.render_small = broken
    reply = await client.post(CHAT, json=HELLO)
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert "secret path" in caplog.text
    assert (await client.get("/health")).status_code == 200


async def test_silence_is_filled_with_comments(app: Any, gate: Path) -> None:
    app.state.service.keep_alive = 0.01
    comments = 0

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        async def watched(message: Any) -> None:
            nonlocal comments
            comments += b": keep-alive" in message.get("body", b"")
            if comments == 4:
                gate.touch()
            await send(message)

        await app(scope, receive, watched)

    transport = httpx.ASGITransport(app=counted)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post(CHAT, json=HELLO | {"stream": True, "max_tokens": 2})
    assert reply.text.startswith(": keep-alive\n\n")
    assert reply.text.count(": keep-alive\n\n") >= 4
    assert reply.text.endswith("data: [DONE]\n\n")


async def test_request_ids(client: httpx.AsyncClient) -> None:
    reply = await client.post(CHAT, json=HELLO, headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert reply.json()["id"] == "chatcmpl-abc-1"
    for bad in ("a b", "x" * 500):
        reply = await client.post(CHAT, json=HELLO, headers={"x-request-id": bad})
        assert reply.headers["x-request-id"] != bad


async def test_health_follows_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    paths = ("/health", "/v1/health/ready", "/v1/health/live")
    assert [(await client.get(path)).status_code for path in paths] == [200, 200, 200]
    engine.state = Health(ready=False, alive=True, reason="restarting", retry_after=4)
    replies = [await client.get(path) for path in paths]
    assert [reply.status_code for reply in replies] == [503, 503, 200]
    assert replies[0].json()["message"] == "restarting"
    assert replies[0].headers["retry-after"] == "4"
    engine.state = Health(ready=False, alive=False, reason="no step for 60 s")
    assert (await client.get("/v1/health/live")).status_code == 503


async def test_models_version_metrics(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed] == ["fake"]
    assert listed[0]["max_model_len"] == 512
    assert (await client.get("/v1/models/fake")).json() == listed[0]
    assert (await client.get("/version")).json()["version"]
    await client.post(CHAT, json={})
    text = (await client.get("/metrics")).text
    assert (
        'headrace_http_requests_total{method="POST",route="/v1/chat/completions",status="400"} 1.0'
        in text
    )


async def test_the_document_lists_every_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatBody"}
    schemas = document["components"]["schemas"]
    assert "Message" in schemas
    assert schemas["ChatBody"]["additionalProperties"] == {"type": "null"}
    assert schemas["Message"]["additionalProperties"] is True
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in schemas
