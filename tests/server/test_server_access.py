"""The access log: one line a request, with its key, model, tokens and times."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.obs.logs import configure_logs
from headrace.server.app import create_app
from headrace.server.inside import post
from headrace.server.keys import Key, hash_of, write_keys

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = configure_logs("info", "json", stream)
    yield stream
    import logging

    logging.getLogger().removeHandler(handler)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    read = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line["fields"] for line in read if line["message"] == "exchange"]


@pytest.fixture
async def keyed(engine: FakeEngine, tmp_path: Path) -> Any:
    path = tmp_path / "keys.toml"
    write_keys(path, [Key("team-a", hash_of("secret"))])
    app = create_app(engine, ServerOptions(keys=str(path), served_name="m"))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    headers = {"authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=headers) as one:
        yield one


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 4}),
        ("/v1/messages", {**CHAT, "model": "m"}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/api/chat", {"messages": CHAT["messages"], "model": "m", "options": {"num_predict": 4}}),
        ("/completion", {"prompt": "hello", "n_predict": 4}),
    ],
)
async def test_a_line_says_who_used_what(
    keyed: httpx.AsyncClient, log: io.StringIO, path: str, body: dict[str, Any], stream: bool
) -> None:
    reply = await keyed.post(path, json={**body, "stream": stream})
    assert reply.status_code == 200, reply.text
    (line,) = lines(log)
    assert line["key"] == "team-a"
    assert line["model"] == "m"
    assert line["path"] == path
    assert line["status"] == 200
    assert line["prompt_tokens"] > 0
    assert line["cached_tokens"] >= 0
    assert line["completion_tokens"] > 0
    assert line["finish"] in ("length", "stop")
    assert 0 < line["ttft_seconds"] <= line["seconds"]
    assert "hi" not in line.values()
    assert "secret" not in log.getvalue()


async def test_tokens_are_those_of_the_answer(keyed: httpx.AsyncClient, log: io.StringIO) -> None:
    reply = await keyed.post("/v1/chat/completions", json={**CHAT, "n": 2})
    used = reply.json()["usage"]
    (line,) = lines(log)
    assert line["prompt_tokens"] == used["prompt_tokens"]
    assert line["completion_tokens"] == used["completion_tokens"]


async def test_a_refusal_has_no_tokens(keyed: httpx.AsyncClient, log: io.StringIO) -> None:
    await keyed.post("/v1/chat/completions", json={**CHAT, "model": "other"})
    await keyed.post(
        "/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer wrong-key"}
    )
    first, second = lines(log)
    assert (first["status"], first["key"]) == (404, "team-a")
    assert (first["error"], first["param"]) == ("model_not_found", "model")
    assert second["status"] == 401
    assert "key" not in second
    assert not {"prompt_tokens", "finish", "ttft_seconds"} & (set(first) | set(second))


async def test_text_lines_have_the_same(client: httpx.AsyncClient) -> None:
    stream = io.StringIO()
    configure_logs("info", "text", stream)
    await client.post("/v1/chat/completions", json=CHAT)
    (line,) = [line for line in stream.getvalue().splitlines() if "exchange" in line]
    for name in ("model", "prompt_tokens", "cached_tokens", "completion_tokens", "finish"):
        assert f" {name}=" in line
    assert " key=" not in line


async def test_a_request_of_a_batch_has_a_line(engine: FakeEngine, log: io.StringIO) -> None:
    app = create_app(engine, ServerOptions())  # type: ignore[arg-type]
    body = json.dumps(CHAT).encode()
    path = "/v1/chat/completions"
    answer = await post(app, app.inside, path, body, request_id="r", account=None, owner="")
    assert answer.status == 200
    (line,) = lines(log)
    assert line["inside"] is True
    assert line["completion_tokens"] == answer.usage.completion  # type: ignore[union-attr]
