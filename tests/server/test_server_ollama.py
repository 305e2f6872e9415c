"""Ollama's interface: shapes, mistakes, and its real client."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from processes import Running, fake_server, running
from server_fake import FakeEngine

from headrace.base.config import ServerOptions
from headrace.server.app import Application, create_app
from headrace.server.keys import Key, hash_of, new_key, write_keys
from headrace.server.residents import kept_seconds

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "fake", "messages": MESSAGES, "options": {"num_predict": 5}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_server()) as server:
        yield server


@pytest.fixture(scope="module")
def real(server: Running) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url) as client:
        yield client


def test_the_real_client_lists_and_shows(real: ollama.Client) -> None:
    (model,) = real.list().models
    assert model.model == "fake:latest"
    assert model.digest is not None
    assert len(model.digest) == 64
    (running_,) = real.ps().models
    assert running_.model == "fake:latest"
    assert running_.context_length == 512
    shown = real.show("fake")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["fake.context_length"] == 512


@pytest.mark.parametrize("name", ["fake", "fake:latest"])
def test_the_real_client_chats(real: ollama.Client, name: str) -> None:
    options = {"num_predict": 5, "temperature": 0, "repeat_penalty": 1.1, "num_ctx": 4096}
    answer = real.chat(name, MESSAGES, options=options, keep_alive="5m")
    assert answer.message.content == "Hello"
    assert (answer.model, answer.done, answer.done_reason) == (name, True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (len("<user>hi"), 5)
    assert answer.total_duration
    assert answer.total_duration >= (answer.eval_duration or 0) > 0
    parts = list(real.chat(name, MESSAGES, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Hello"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 5


def test_the_real_client_generates(real: ollama.Client) -> None:
    answer = real.generate("fake", "hi", options={"num_predict": 5}, system="be")
    assert answer.response == "Hello"
    assert answer.prompt_eval_count == len("<system>be<user>hi")
    assert answer.context is not None
    again = real.generate("fake", "ho", options={"num_predict": 2}, context=answer.context)
    assert again.prompt_eval_count == len(answer.context) + len("<user>ho")
    parts = list(real.generate("fake", "hi", raw=True, stream=True, options={"num_predict": 5}))
    assert "".join(part.response for part in parts) == "Hello"
    assert parts[-1].prompt_eval_count == 2
    # No prompt asks for the model to be loaded.
    assert real.generate("fake").done_reason == "load"
    assert real.chat("fake", []).done_reason == "load"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (CHAT | {"model": "other"}, 404, "other"),
        (CHAT | {"messages": [MESSAGES[0] | {"images": ["aGk="]}]}, 400, "images"),
        (CHAT | {"options": {"mirostat": 2}}, 400, "mirostat"),
        (CHAT | {"options": {"temperatur": 1}}, 400, "temperatur"),
        (CHAT | {"options": {"temperature": -1}}, 400, "temperature"),
        (CHAT | {"format": "yaml"}, 400, "format"),
        (CHAT | {"think": True}, 400, "thinking"),
        (CHAT | {"messages": "hi"}, 400, "messages"),
        ({"messages": MESSAGES}, 400, "model"),
    ],
)
async def test_mistakes_are_in_ollamas_shape(
    client: httpx.AsyncClient, body: dict[str, Any], status: int, words: str
) -> None:
    for stream in (True, False):
        reply = await client.post("/api/chat", json={**body, "stream": stream})
        assert reply.status_code == status
        assert list(reply.json()) == ["error"]
        assert words in reply.json()["error"]


async def test_other_mistakes(client: httpx.AsyncClient) -> None:
    for path, body, status in (
        ("/api/show", {}, 400),
        ("/api/show", {"model": "other"}, 404),
        ("/api/generate", {"model": "fake", "prompt": "a", "suffix": "b"}, 400),
        ("/api/generate", {"model": "fake", "prompt": "a", "context": [9999]}, 400),
        ("/api/generate", {"model": "fake", "prompt": "a", "images": ["x"]}, 400),
        ("/api/generate", {"model": "fake", "prompt": "a", "template": "x"}, 400),
        ("/api/embed", {"model": "fake", "input": "a"}, 400),
        ("/api/embeddings", {"model": "fake", "prompt": "a"}, 400),
    ):
        reply = await client.post(path, json=body)
        assert (reply.status_code, list(reply.json())) == (status, ["error"]), path
    reply = await client.post("/api/chat", content=b"{", headers={"content-type": "text/plain"})
    assert reply.status_code == 415
    assert (await client.get("/api/version")).json()["version"][0].isdigit()


async def test_clients_that_name_no_type_are_understood_and_foreign_pages_are_not(
    client: httpx.AsyncClient,
) -> None:
    data = json.dumps(CHAT).encode()
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):
        request = client.build_request("POST", "/api/chat", content=data, headers=headers)
        assert (await client.send(request)).status_code == 200
        request.headers["origin"] = "https://evil.example"
        refused = await client.post("/api/chat", content=data, headers=dict(request.headers))
        assert refused.status_code == 403
    # Elsewhere they are asked for it.
    reply = await client.post("/v1/chat/completions", content=data)
    assert reply.status_code == 415


async def test_options_become_sampling(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.4,
        "min_p": 0.1,
        "seed": 9,
        "stop": ["x"],
        "repeat_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
    }
    await client.post("/api/chat", json={**CHAT, "options": options})
    sampling = engine.seen[-1][1]
    assert sampling.max_tokens == 7
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.4)
    assert (sampling.min_p, sampling.seed, sampling.stop) == (0.1, 9, ["x"])
    assert sampling.repetition_penalty == 1.2
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.2)
    await client.post("/api/chat", json={**CHAT, "stream": False, "options": {"num_predict": -1}})
    assert engine.seen[-1][1].max_tokens == 512 - len("<user>hi")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.fixture
async def caller() -> Any:
    """A server whose model answers with a call."""
    engine = FakeEngine(answer=CALL, template="<tool_call> </tool_call> tools")
    engine.once = True
    app = create_app(engine, ServerOptions())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_calls_are_objects_and_their_results_come_back(caller: httpx.AsyncClient) -> None:
    body = {**CHAT, "tools": [TOOL], "options": {}}
    reply = (await caller.post("/api/chat", json={**body, "stream": False})).json()
    (call,) = reply["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert call["function"]["arguments"] == {"a": 1, "b": 2}
    assert reply["message"]["content"] == ""
    assert reply["done_reason"] == "stop"
    text = (await caller.post("/api/chat", json=body)).text
    lines = [json.loads(each) for each in text.splitlines()]
    assert [bool(each["message"].get("tool_calls")) for each in lines] == [True, False]
    turns = [
        *MESSAGES,
        reply["message"],
        {"role": "tool", "tool_name": "add", "content": "3"},
    ]
    again = await caller.post("/api/chat", json={**body, "messages": turns, "stream": False})
    assert again.status_code == 200, again.text


async def test_a_call_that_was_cut_is_left_out(caller: httpx.AsyncClient) -> None:
    body = {**CHAT, "tools": [TOOL], "options": {"num_predict": 50}, "stream": False}
    reply = (await caller.post("/api/chat", json=body)).json()
    assert reply["done_reason"] == "length"
    assert "tool_calls" not in reply["message"]


async def test_a_fault_after_the_first_token_is_a_line(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    from headrace.base.errors import EngineFault

    engine.fault, engine.fault_after = EngineFault("the step failed"), 2
    reply = await client.post("/api/chat", json=CHAT)
    assert reply.status_code == 200
    last = json.loads(reply.text.splitlines()[-1])
    assert last == {"error": "the step failed"}
    engine.fault_after = 0
    reply = await client.post("/api/chat", json=CHAT)
    assert (reply.status_code, reply.json()) == (500, {"error": "the step failed"})


async def test_the_gate_refuses_in_the_same_shape(tmp_path: Any, engine: FakeEngine) -> None:
    key = new_key()
    write_keys(tmp_path / "keys.toml", [Key("user", hash_of(key))])
    options = ServerOptions(keys=str(tmp_path / "keys.toml"))
    app: Application = create_app(engine, options)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.get("/api/tags")
        assert (reply.status_code, list(reply.json())) == (401, ["error"])
        assert isinstance(reply.json()["error"], str)
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.get("/api/tags", headers=headers)).status_code == 200


@pytest.mark.parametrize("text", ["-" * 5000, "a" * 50_000, "9" * 33, "--1", "-", "", "soon"])
def test_a_foreign_keep_alive_is_refused(server: Running, text: str) -> None:
    body = CHAT | {"keep_alive": text, "stream": False}
    reply = httpx.post(f"{server.url}/api/chat", json=body)
    assert (reply.status_code, "keep_alive" in reply.text) == (400, True), reply.text


def test_a_keep_alive_of_centuries_is_for_ever() -> None:
    """A date so far away could not be written in `/api/ps`."""
    for text in (1e12, "1e12", "1e300h", -1, "-5m"):
        assert kept_seconds(text) == math.inf
    assert (kept_seconds("5m"), kept_seconds(7), kept_seconds(1e9)) == (300.0, 7.0, 1e9)
