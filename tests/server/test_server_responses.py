"""OpenAI's Responses interface: shapes, events, conversations, background, cancel."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from server_fake import FakeEngine
from test_server_tools import ANSWER, TEMPLATE

from headrace.base.config import ServerOptions
from headrace.base.errors import EngineFault, OptionError
from headrace.server.app import create_app
from headrace.server.store import ResponseStore, Stored

PATH = "/v1/responses"
TOOLS = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {"type": "function", "name": "time"},
]


class Api:
    def __init__(self, answer: str = "Hello", **options: Any) -> None:
        self.engine = FakeEngine(answer=answer, template=TEMPLATE)
        self.engine.once = True
        self.app = create_app(self.engine, ServerOptions(**options))  # type: ignore[arg-type]
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.app), base_url="http://test/v1"
        )
        self.client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="x", http_client=self.http, max_retries=0
        )

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.http.post("/responses", json={"input": "hi"} | body)


def events(reply: httpx.Response) -> list[Any]:
    found = []
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_text() -> None:
    response = await Api().client.responses.create(model="fake", input="hi", metadata={"a": "b"})
    assert response.output_text == "Hello"
    assert response.status == "completed"
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.output_tokens == 5
    assert response.usage.input_tokens_details.cached_tokens == 3


async def test_cut() -> None:
    reply = (await Api().ask(max_output_tokens=2)).json()
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["output"][0]["status"] == "incomplete"


async def test_events_add_up_to_the_response() -> None:
    found = events(await Api(ANSWER).ask(tools=TOOLS, stream=True))
    assert [found[0]["type"], found[1]["type"]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == "response.completed"
    output = found[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert json.loads(output[2]["arguments"]) == {"city": "Bern", "days": 2}
    assert found[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    texts: dict[str, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    for item in output:
        whole = item.get("arguments") or item["content"][0]["text"]
        assert texts[item["id"]] == whole
    added = [e["item"]["id"] for e in found if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert added == [item["id"] for item in output]
    assert done == output


async def test_the_official_client_reads_the_stream() -> None:
    api = Api(ANSWER)
    stream = await api.client.responses.create(model="fake", input="x", tools=TOOLS, stream=True)  # type: ignore[call-overload]
    kinds = [event.type async for event in stream]
    assert kinds[-1] == "response.completed"


async def test_a_conversation_goes_on() -> None:
    api = Api()
    seen: list[Any] = []
    api.engine.template.render_small = lambda messages, **_: seen.append(messages) or "prompt"
    first = (await api.ask(instructions="Be brief.")).json()
    second = (
        await api.ask(
            previous_response_id=first["id"],
            input=[
                {"role": "user", "content": [{"type": "input_text", "text": "again"}]},
            ],
        )
    ).json()
    await api.ask(previous_response_id=second["id"], input="third")
    # Instructions hold for their own turn alone.
    assert [m["content"] for m in seen[0]] == ["Be brief.", "hi"]
    assert [m["content"] for m in seen[2]] == ["hi", "Hello", "again", "Hello", "third"]
    stored = await api.http.get(f"/responses/{first['id']}")
    assert stored.json() == first
    items = (await api.http.get(f"/responses/{second['id']}/input_items")).json()
    assert items["data"][0]["content"][0]["text"] == "again"
    assert (await api.http.delete(f"/responses/{first['id']}")).json()["deleted"] is True
    for method in ("get", "delete"):
        gone = await getattr(api.http, method)(f"/responses/{first['id']}")
        assert gone.status_code == 404
    reply = await api.ask(previous_response_id=second["id"])
    assert reply.status_code == 404
    assert reply.json()["error"]["param"] == "previous_response_id"


async def test_calls_and_their_outputs_are_messages() -> None:
    api = Api()
    seen: list[Any] = []
    api.engine.template.render_small = lambda messages, **_: seen.append(messages) or "prompt"
    await api.ask(
        input=[
            {"role": "user", "content": "Weather?"},
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
        ]
    )
    roles = [message["role"] for message in seen[0]]
    assert roles == ["user", "assistant", "tool"]
    assert seen[0][1]["reasoning_content"] == "hm"
    assert seen[0][1]["tool_calls"][0]["id"] == "c1"


async def test_what_is_not_stored_is_not_found() -> None:
    api = Api()
    reply = (await api.ask(store=False)).json()
    assert reply["store"] is False
    assert (await api.http.get(f"/responses/{reply['id']}")).status_code == 404


async def test_background_work_and_its_end() -> None:
    api = Api()
    queued = (await api.ask(background=True)).json()
    assert queued["status"] == "queued"
    for _ in range(6000):
        stored = (await api.http.get(f"/responses/{queued['id']}")).json()
        if stored["status"] == "completed":
            break
        await asyncio.sleep(0.01)
    assert stored["output"][0]["content"][0]["text"] == "Hello"
    assert api.app.state.service.in_work == 0


async def test_background_work_is_cancelled(tmp_path: Path) -> None:
    api = Api(answer="x" * 400)
    api.engine.gate = tmp_path / "gate"
    queued = (await api.ask(background=True)).json()
    while not api.engine.held:
        await asyncio.sleep(0.01)
    assert api.app.state.service.in_work == 1
    cancelled = (await api.http.post(f"/responses/{queued['id']}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert not api.engine.running
    assert api.app.state.service.in_work == 0
    api.engine.gate.touch()
    whole = (await api.ask()).json()
    assert (await api.http.post(f"/responses/{whole['id']}/cancel")).status_code == 400


async def test_a_fault_in_the_stream_fails_the_response() -> None:
    api = Api()
    api.engine.fault, api.engine.fault_after, api.engine.delay = EngineFault("broken"), 2, 0.005
    found = events(await api.ask(stream=True))
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["message"] == "broken"
    api.engine.fault_after = 0
    assert (await api.ask(stream=True)).status_code == 500


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input.0.arguments"),
        ({"input": [{"content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["nothing"]}, "include.0"),
        ({"colour": 1}, "colour"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
    ids=str,
)
async def test_mistakes(change: dict[str, Any], param: str) -> None:
    reply = await Api().ask(**change)
    assert reply.status_code in (400, 404), reply.text
    assert reply.json()["error"]["param"] == param


async def test_the_store_survives_and_forgets_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "responses.db"
    first = Api(store=str(path))
    made = (await first.ask()).json()
    first.app.state.responses.store.close()
    assert path.stat().st_mode & 0o077 == 0
    again = Api(store=str(path))
    assert (await again.http.get(f"/responses/{made['id']}")).json() == made
    store = ResponseStore(most=10)
    for number in range(101):
        stored = Stored(str(number), None, [], {"number": number})
        assert await store.put(stored, "me", created=number)
    assert await store.get("100", "me") == stored
    assert await store.get("50", "me") is None
    assert await store.get("100", "another") is None


async def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OptionError):
        ResponseStore(tmp_path / "file" / "x.db")
    (tmp_path / "bad.db").write_text("this is no database, and long enough to be noticed" * 50)
    with pytest.raises(OptionError):
        ResponseStore(tmp_path / "bad.db")
    api = Api()
    api.app.state.store._base.now(lambda base: base.execute("pragma query_only = on"))
    reply = (await api.ask()).json()
    assert reply["output"][0]["content"][0]["text"] == "Hello"
    assert reply["store"] is False
