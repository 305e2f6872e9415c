"""Answers that come anew, since the engine died in their middle: to the client as if it had not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from server_fake import FakeEngine
from test_server_tools import ANSWER, TEMPLATE

from headrace.base.errors import EngineDead
from headrace.engine.clients.stream import Stream
from headrace.server.app import Application

SAID = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "weather"}},
    {"type": "function", "function": {"name": "time"}},
]
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True}),
    "prompts": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "return_token_ids": True}),
    "scores": ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}),
    "chat": ("/v1/chat/completions", {"messages": SAID, "logprobs": True, "top_logprobs": 2}),
    "choices": ("/v1/chat/completions", {"messages": SAID, "n": 3, "return_token_ids": True}),
    "tools": ("/v1/chat/completions", {"messages": SAID, "tools": TOOLS}),
    "messages": ("/v1/messages", {"messages": SAID}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "responses scored": (
        "/v1/responses",
        {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "ollama chat": ("/api/chat", {"messages": SAID, "stream": False}),
    "ollama generate": ("/api/generate", {"prompt": "hi", "stream": False}),
    "llama.cpp": ("/completion", {"prompt": "hi", "return_tokens": True}),
    "llama.cpp indented": ("/completion", {"prompt": "hi", "n_indent": 2}),
}
MOST = 150
TIMES = {"id", "call_id", "created", "created_at", "timings"}


@pytest.fixture
def engine() -> FakeEngine:
    """Speaks of its reasoning, and calls tools."""
    engine = FakeEngine(answer=ANSWER, template=TEMPLATE)
    engine.once = True
    return engine


def asked(name: str, **more: Any) -> tuple[str, dict[str, Any]]:
    path, body = ASKS[name]
    wanted = {
        "/v1/responses": "max_output_tokens",
        "/completion": "n_predict",
        "/api/chat": "options",
        "/api/generate": "options",
    }.get(path, "max_tokens")
    most: Any = {"num_predict": MOST} if wanted == "options" else MOST
    return path, {"model": "fake", **body, wanted: most, **more}


def timeless(value: Any) -> Any:
    """Without what differs between two equal answers."""
    if isinstance(value, dict):
        return {
            key: timeless(inner)
            for key, inner in value.items()
            if key not in TIMES and not key.endswith("_duration")
        }
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("after", [0, 1, 25, MOST - 20])
async def test_an_answer_that_came_anew_is_the_same(
    client: httpx.AsyncClient, engine: FakeEngine, name: str, after: int
) -> None:
    path, body = asked(name)
    plain = await client.post(path, json=body)
    assert plain.status_code == 200, plain.text
    engine.dies_after = after
    anew = await client.post(path, json=body)
    assert engine.dies_after is None or "indented" in name  # Which ends before.
    assert anew.status_code == 200, anew.text
    assert timeless(anew.json()) == timeless(plain.json())


async def test_reasoning_is_counted_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    path, body = asked("tools")
    counts = []
    for after in (None, 10, 100):
        engine.dies_after = after
        counts.append((await client.post(path, json=body)).json()["usage"])
    assert counts[0] == counts[1] == counts[2]
    assert counts[0]["completion_tokens_details"]["reasoning_tokens"] > 0


async def ended(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    while True:
        answer: dict[str, Any] = (await client.get(f"/v1/responses/{response_id}")).json()
        if answer["status"] != "in_progress":
            return answer
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("after", [0, 1, 25, MOST - 20])
async def test_what_is_made_in_the_background_comes_anew(
    client: httpx.AsyncClient, engine: FakeEngine, after: int
) -> None:
    path, body = asked("responses", background=True)
    plain = await ended(client, (await client.post(path, json=body)).json()["id"])
    assert plain["output"]
    engine.dies_after = after
    anew = await ended(client, (await client.post(path, json=body)).json()["id"])
    assert engine.dies_after is None
    for answer in (plain, anew):  # Counted by delta, and those that wait are merged.
        del answer["usage"]["output_tokens_details"]
    assert timeless(anew) == timeless(plain)


@pytest.mark.parametrize("seen", [False, True])
async def test_background_work_that_is_watched_ends_with_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """A client that has seen events cannot be given others; one that has seen none can."""
    show = Stream.show

    def then_die(stream: Stream) -> bool:
        shown = show(stream)
        assert shown
        assert not stream.repeatable
        stream.fail(EngineDead("the engine died", retry_after=1.0))
        return shown

    if seen:
        engine.delay = 0.1  # Of some hundred tokens, none of the last has come by then.
        monkeypatch.setattr(Stream, "show", then_die)
    else:
        engine.dies_after = 0
    path, body = asked("responses", background=True, stream=True)
    text = (await client.post(path, json=body)).text
    assert engine.dies_after is None
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    end = "failed" if seen else "incomplete"
    assert events[-1]["type"] == f"response.{end}"
    assert events[-1]["response"]["status"] == end


async def test_background_work_whose_server_is_gone_has_failed(
    app: Application, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """After a kill of the API process only the store remembers the work."""
    engine.delay = 0.5
    path, body = asked("responses", background=True)
    name = (await client.post(path, json=body)).json()["id"]
    assert (await client.get(f"/v1/responses/{name}")).json()["status"] == "in_progress"
    running = app.state.responses.running
    task = running.pop(name)
    left = (await client.get(f"/v1/responses/{name}")).json()
    running[name] = task
    assert (left["status"], left["error"]["code"]) == ("failed", "server_error")
    cancelled = await client.post(f"/v1/responses/{name}/cancel", json={})
    assert cancelled.json()["status"] == "cancelled"


@pytest.mark.parametrize("name", ["completions", "chat"])
async def test_a_stream_ends_with_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, name: str
) -> None:
    path, body = asked(name, stream=True)
    engine.dies_after = 20
    text = (await client.post(path, json=body)).text
    assert '"engine_dead"' in text


async def test_a_form_of_llamacpp_is_checked_off_the_loop(
    app: Application, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = app.state.service.hands
    seen, run = [], hands.run

    async def watched(work: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(getattr(work, "__name__", ""))
        return await run(work, *arguments, **named)

    monkeypatch.setattr(hands, "run", watched)
    path, body = asked("llama.cpp", json_schema={"type": "boolean"})
    await client.post(path, json=body)
    assert "form" in seen
