"""Requests in other services' words: reasoning, names of tools, numbers, what stands for "none"."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from server_fake import FakeEngine

from headrace.server.app import create_app

ASK: Any = [{"role": "user", "content": "hi"}]
MARKS = "<tool_call> </tool_call> <think> </think>"


class Server:
    """The application around an engine, and what its template was given."""

    def __init__(self) -> None:
        self.engine = FakeEngine(answer="Hello", template=MARKS)
        self.engine.once = True
        self.given: dict[str, Any] = {}
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=create_app(self.engine)),  # type: ignore[arg-type]
            base_url="http://test",
        )

        def render(messages: Any, **given: Any) -> str:
            self.given = given | {"messages": messages}
            return "hi"

        self.engine.template.render = self.engine.template.render_small = render

    async def ask(self, **more: Any) -> dict[str, Any]:
        body = {"messages": ASK, "max_tokens": 20} | more
        reply = await self.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    async def refused(self, **more: Any) -> str:
        reply = await self.http.post("/v1/chat/completions", json={"messages": ASK} | more)
        assert reply.status_code == 400
        param: str = reply.json()["error"]["param"]
        return param


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.mark.parametrize(
    ("wish", "variables"),
    [
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive", "clear_thinking": True}}, {"enable_thinking": True}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"reasoning": {"effort": "none"}},
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        (
            {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
            {"reasoning_effort": "high"},
        ),
        ({"reasoning": None, "thinking": None}, {}),
    ],
)
async def test_reasoning_in_other_words(
    server: Server, wish: dict[str, Any], variables: dict[str, Any]
) -> None:
    await server.ask(**wish)
    assert server.given["variables"] == variables


async def test_reasoning_that_is_not_wanted_is_not_sent(server: Server) -> None:
    server.engine.answer = "<think>so</think>Hello"
    told = await server.ask()
    assert told["choices"][0]["message"]["reasoning_content"] == "so"
    told = await server.ask(reasoning={"exclude": True})
    assert "reasoning_content" not in told["choices"][0]["message"]


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": -5}}, "reasoning.max_tokens"),
    ],
)
async def test_a_wrong_wish_is_named(server: Server, wish: dict[str, Any], param: str) -> None:
    assert await server.refused(**wish) == param


async def test_the_reasoning_of_an_earlier_answer_comes_as_parts(server: Server) -> None:
    parts = [
        {"type": "thinking", "thinking": "a", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "text": "b"},
        {"type": "text", "text": "Hello"},
    ]
    await server.ask(messages=[*ASK, {"role": "assistant", "content": parts}, *ASK])
    said = server.given["messages"][1]
    assert said["reasoning_content"] == "ab"
    assert said["content"] == [{"type": "text", "text": "Hello"}]
    param = await server.refused(messages=[{"role": "user", "content": parts}])
    assert param == "messages.0.content.0"


@pytest.mark.parametrize(
    "name", ["mcp__git/hub:list-issues", "a.b@c", "long_" * 25], ids=["marks", "at", "long"]
)
async def test_names_of_tools_that_servers_of_tools_make(server: Server, name: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    server.engine.answer = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
    told = await server.ask(tools=[tool], max_tokens=500)
    assert [each["function"]["name"] for each in server.given["tools"]] == [name]
    (call,) = told["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": name, "arguments": "{}"}


async def test_what_no_name_of_a_tool_may_be(server: Server) -> None:
    for name in ("", "a b", 'a"b', "a\nb", "x" * 129):
        tool = {"type": "function", "function": {"name": name}}
        assert await server.refused(tools=[tool]) == "tools.0.function.name"


async def test_whole_numbers_with_a_point_are_integers(server: Server) -> None:
    await server.ask(n=2.0, top_k=40.0, max_tokens=5.0, seed=7.0)
    sampling = server.engine.seen[-1][1]
    assert (sampling.n, sampling.top_k, sampling.max_tokens, sampling.seed) == (2, 40, 5, 7)
    assert all(type(value) is int for value in (sampling.n, sampling.top_k, sampling.seed))
    assert await server.refused(n=1.5) == "n"
    assert await server.refused(max_tokens=1e300) == "max_tokens"
    assert await server.refused(n=True) == "n"
    assert await server.refused(n="1") == "n"


@pytest.mark.parametrize("stop", ["", [], [""], ["", "x"]])
async def test_an_empty_stop_is_none(server: Server, stop: Any) -> None:
    await server.ask(stop=stop)
    assert server.engine.seen[-1][1].stop == [text for text in stop if text]


async def test_no_share_at_all_is_the_likeliest_token(server: Server) -> None:
    await server.ask(top_p=0)
    assert 0 < server.engine.seen[-1][1].top_p < 1e-5
    assert await server.refused(top_p=-0.1) == "top_p"
