"""Surplus in clients' requests: echoed, decorated, hinted, null. By the real libraries, which speak
to the application in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import httpx2
import openai
import pytest
import uvicorn
from server_fake import FakeEngine

from headrace.base.ignored import all_ignored
from headrace.server.app import create_app
from headrace.server.logprobs import token_name

TEMPLATE = "<tool_call> </tool_call> <think> </think>"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
PLAIN = "```json\n" + CALL + "\n```"
ASK: Any = [{"role": "user", "content": "hi"}]


class Server:
    """The application around an engine that answers what it was told, and its clients."""

    def __init__(self, answer: str = "Hello") -> None:
        import anthropic  # A second of CPU that no worker pays which runs other files.

        self.engine = FakeEngine(answer=answer, template=TEMPLATE)
        self.engine.once = True
        self.app = create_app(self.engine)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app=self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")
        self.openai = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="x", max_retries=0, http_client=self.http
        )
        self.anthropic = anthropic.AsyncAnthropic(
            base_url="http://test",
            api_key="x",
            max_retries=0,
            http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(app=self.app)),
        )

    def render(self, render: Callable[..., str]) -> None:
        """Put this in place of the template."""
        self.engine.template.render = self.engine.template.render_small = render

    async def chat(self, **more: Any) -> Any:
        given: Any = {"model": "fake", "messages": ASK, "max_tokens": 200} | more
        return await self.openai.chat.completions.create(**given)

    async def message(self, **more: Any) -> Any:
        given: Any = {"model": "fake", "messages": ASK, "max_tokens": 200} | more
        return await self.anthropic.messages.create(**given)

    async def response(self, **more: Any) -> Any:
        return await self.openai.responses.create(**({"model": "fake", "input": "hi"} | more))


@pytest.fixture
def server() -> Server:
    return Server()


HINTS: list[dict[str, Any]] = [
    {"store": True},
    {"service_tier": "flex"},
    {"service_tier": "priority"},
    {"verbosity": "low"},
    {"prediction": {"type": "content", "content": "x"}},
    {"modalities": ["text"]},
    {"extra_body": {"foo": None}},
    {"extra_body": {"temprature": None}},
    {"temperature": None},
    {"top_logprobs": 0},
    {"extra_body": {"cache_prompt": True}},
    # LM Studio's, Ollama's, OpenRouter's and SGLang's, which editors send to any server.
    {"extra_body": {"ttl": 300, "draft_model": "x", "keep_alive": "5m", "num_ctx": 4096}},
    {"extra_body": {"usage": {"include": True}, "provider": {"order": []}, "transforms": []}},
    {"extra_body": {"separate_reasoning": True, "timings_per_token": True}},
    {"extra_body": {"enable_thinking": False}},
    {"reasoning_effort": "max"},
    {"extra_body": {"guided_decoding_backend": "xgrammar"}},
    {"extra_body": {"spaces_between_special_tokens": False}},
    {"extra_body": {"documents": [{"text": "x"}]}},
    {"extra_body": {"add_special_tokens": False}},
    {
        "tools": [WEATHER]
        + [{"type": "function", "function": {"name": f"tool_{i}"}} for i in range(300)]
    },
]


@pytest.mark.parametrize("hint", HINTS, ids=lambda hint: json.dumps(hint)[:50])
async def test_hints_of_chat_are_accepted(server: Server, hint: dict[str, Any]) -> None:
    assert (await server.chat(**hint)).choices[0].message.content == "Hello"


async def test_a_limit_of_minus_one_is_none(server: Server) -> None:
    """LM Studio's and llama.cpp's clients write it so."""
    hi = [{"role": "user", "content": "hi"}]
    for path, asked in (("chat/completions", {"messages": hi}), ("completions", {"prompt": "hi"})):
        sent = await server.http.post(f"/v1/{path}", json={**asked, "max_tokens": -1})
        assert sent.status_code == 200, sent.text
        assert sent.json()["choices"][0]["finish_reason"] == "stop"
        sent = await server.http.post(f"/v1/{path}", json={**asked, "max_tokens": -2})
        assert sent.json()["error"]["param"] == "max_tokens"


async def test_a_call_with_an_object_and_a_tool_without_a_word(server: Server) -> None:
    """Arguments as an object, as Ollama's clients keep them; null where a tool gave nothing."""
    asked = {"role": "user", "content": "hi"}
    for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
        call = {
            "id": "c",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
        history: Any = [
            asked,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": None},
        ]
        sent = await server.http.post("/v1/chat/completions", json={"messages": history})
        assert sent.status_code == 200, sent.text


async def test_echoed_and_decorated_messages_are_read_and_counted(server: Server) -> None:
    before = all_ignored()
    history: Any = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
        },
        # As LiteLLM gives it back.
        {
            "role": "assistant",
            "content": None,
            "provider_specific_fields": {"refusal": None},
            "function_call": None,
            "images": [],
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "thought_signature": "x",
                    "function": {"name": "weather", "arguments": "{}", "provider": "y"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny", "is_error": False},
    ]
    tool = {**WEATHER, "cache_control": {}, "function": {**WEATHER["function"], "examples": [1]}}
    await server.chat(messages=history, tools=[tool])
    counted = {name: count - before.get(name, 0) for name, count in all_ignored().items()}
    expected = {
        "ContentPart": 1,
        "Message": 3,
        "ToolCall": 1,
        "FunctionCall": 1,
        "Tool": 1,
        "FunctionSpec": 1,
    }
    assert {name: counted[name] for name in expected} == expected
    text = (await server.http.get("/metrics")).text
    assert 'headrace_ignored_fields_total{where="Message"}' in text


async def test_what_changes_the_answer_is_an_error_that_says_what_to_do(server: Server) -> None:
    for field, value, said in (
        ("temprature", 0.5, "did you mean temperature"),
        ("mirostat", 2, "mirostat"),
        ("modalities", ["text", "audio"], "modalities"),
        ("chat_template", "x", "chat_template"),
    ):
        with pytest.raises(openai.BadRequestError, match=said) as caught:
            await server.chat(extra_body={field: value})
        assert caught.value.param == field
        assert caught.value.code in ("unknown_parameter", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as caught:
        await server.response(reasoning={"colour": 1})
    assert caught.value.param == "reasoning.colour"
    with pytest.raises(openai.BadRequestError, match="messages must have at least 1 item"):
        await server.chat(messages=[])
    with pytest.raises(openai.BadRequestError) as caught:
        await server.chat(messages=[{"role": "user", "content": "x" * 3000}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("answer", [CALL, PLAIN, f"<tool_call>\n{CALL}\n</tool_call>"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_comes_out_on_every_interface(answer: str, stream: bool) -> None:
    server = Server(answer)
    if not stream:
        choice = (await server.chat(tools=[WEATHER])).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Bern"}
    else:
        chunks = [chunk async for chunk in await server.chat(tools=[WEATHER], stream=True)]
        assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        parts = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(p.function.arguments or "" for p in parts) == '{"city": "Bern"}'
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    flat = {"type": "function", **WEATHER["function"]}
    items = (await server.response(tools=[flat])).output
    assert [item.type for item in items] == ["function_call"]
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    if stream:
        async with server.anthropic.messages.stream(
            model="fake", messages=ASK, max_tokens=200, tools=[tool]
        ) as events:
            reply: Any = await events.get_final_message()
    else:
        reply = await server.message(tools=[tool])
    assert reply.stop_reason == "tool_use"
    (block,) = reply.content
    assert (block.type, block.input) == ("tool_use", {"city": "Bern"})
    assert block.id.startswith("toolu_")


async def test_a_number_that_a_limit_cut_stays_in_the_arguments() -> None:
    server = Server('<tool_call>\n{"name": "weather", "arguments": {"a": 123456}}\n</tool_call>')
    choice = (await server.chat(tools=[WEATHER], max_tokens=54)).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == '{"a": 123'
    cut = (await server.chat(tools=[WEATHER], max_tokens=20)).choices[0]
    assert not cut.message.content
    reply = await server.message(
        tools=[{"name": "weather", "input_schema": {"type": "object"}}], max_tokens=54
    )
    assert [block.type for block in reply.content] == ["tool_use"]


async def test_allowed_tools_are_the_only_ones(server: Server) -> None:
    offered: list[Any] = []
    server.render(lambda messages, tools, **_: offered.append(tools) or "prompt")
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"type": "function", "function": {"name": "other"}}
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [allowed]}}
    await server.chat(tools=[WEATHER, other], tool_choice=choice)
    assert [tool["function"]["name"] for tool in offered[0]] == ["other"]


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_old(stream: bool) -> None:
    server = Server(PLAIN)
    history: Any = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'},
        },
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    given: Any = {"messages": history, "functions": [WEATHER["function"]], "function_call": "auto"}
    if stream:
        chunks = [chunk async for chunk in await server.chat(**given, stream=True)]
        calls = [
            c.choices[0].delta.function_call for c in chunks if c.choices[0].delta.function_call
        ]
        assert calls[0].name == "weather"
        assert "".join(call.arguments or "" for call in calls) == '{"city": "Bern"}'
        assert chunks[-1].choices[0].finish_reason == "function_call"
    else:
        choice = (await server.chat(**given)).choices[0]
        assert choice.message.function_call.name == "weather"
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "function_call"


async def test_logprobs_name_what_is_no_character() -> None:
    server = Server("a")
    given: Any = {"logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    entry = (await server.chat(**given)).choices[0].logprobs.content[0]
    assert entry.token == "a"
    reply = await server.chat(**given, extra_body={"return_tokens_as_token_ids": True})
    assert reply.choices[0].logprobs.content[0].token == "token_id:97"
    assert token_name(server.engine.tokenizer, 0xF0, False) == r"bytes:\xf0"  # type: ignore[arg-type]


async def test_the_end_of_a_prompt_that_is_too_long(server: Server) -> None:
    long: Any = [{"role": "user", "content": "x" * 3000 + "END"}]
    await server.chat(messages=long, extra_body={"truncate_prompt_tokens": 10})
    assert bytes(server.engine.seen[-1][0]).endswith(b"END")
    assert len(server.engine.seen[-1][0]) == 10
    await server.openai.completions.create(
        model="fake", prompt="y" * 3000, max_tokens=5, extra_body={"truncate_prompt_tokens": -1}
    )
    assert len(server.engine.seen[-1][0]) == 507


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_in_chat(server: Server, stream: bool) -> None:
    server.render(lambda *_, **__: "prompt")
    more: Any = {
        "messages": [*ASK, {"role": "assistant", "content": "So:"}],
        "extra_body": {
            "continue_final_message": True,
            "add_generation_prompt": False,
            "echo": True,
        },
    }
    if stream:
        chunks = [chunk async for chunk in await server.chat(**more, stream=True)]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "So:Hello"
    else:
        assert (await server.chat(**more)).choices[0].message.content == "So:Hello"


# Anthropic.


async def test_a_tool_use_block_goes_back_as_it_was_dumped() -> None:
    server = Server(CALL)
    tool: Any = {"name": "weather", "input_schema": {"type": "object"}}
    reply = await server.message(tools=[tool])
    dumped = [block.model_dump() for block in reply.content]
    dumped[0]["caller"] = {"type": "direct"}
    history = [
        *ASK,
        {"role": "assistant", "content": dumped},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": dumped[0]["id"], "content": "sunny"}
            ],
        },
    ]
    assert (await server.message(messages=history, tools=[tool])).content


EXTRAS: list[dict[str, Any]] = [
    {"output_config": {"effort": "high"}},
    {"extra_body": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}},
    {
        "tools": [
            {
                "name": "a",
                "input_schema": {"type": "object"},
                "defer_loading": True,
                "eager_input_streaming": True,
                "input_examples": [{}],
            }
        ]
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "title": "T",
                        "source": {"type": "text", "media_type": "text/plain", "data": "plain"},
                    },
                    {
                        "type": "search_result",
                        "source": "u",
                        "title": "S",
                        "content": [{"type": "text", "text": "found"}],
                    },
                    {"type": "text", "text": "hi"},
                ],
            }
        ]
    },
]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: json.dumps(extra)[:40])
async def test_extras_of_claude_code(server: Server, extra: dict[str, Any]) -> None:
    reply = await server.message(**extra)
    assert reply.content[0].text == "Hello"
    if "extra_body" in extra:
        assert reply.model_dump()["context_management"] == {"applied_edits": []}


async def test_a_form_of_anthropics_needs_an_engine_that_holds_one(server: Server) -> None:
    import anthropic

    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    with pytest.raises(anthropic.BadRequestError, match="structured output"):
        await server.message(output_config={"format": {"type": "json_schema", "schema": schema}})


async def test_plain_documents_are_text(server: Server) -> None:
    seen: list[Any] = []
    server.render(lambda messages, **_: seen.append(messages) or "prompt")
    await server.message(messages=EXTRAS[3]["messages"])
    assert seen[0][0]["content"] == "T\nplain\n\nS\nu\nfound\n\nhi"


async def test_tools_of_the_service_are_refused_by_name(server: Server) -> None:
    import anthropic

    for kind in ("web_search_20250305", "bash_20250124"):
        with pytest.raises(anthropic.BadRequestError, match=f"tools.0.type '{kind}'"):
            await server.message(tools=[{"type": kind, "name": "x"}])
    with pytest.raises(anthropic.BadRequestError, match=r"tools\.0\.input_schema is required"):
        await server.message(tools=[{"name": "x"}])


async def test_the_tool_runner_goes_on_without_threads() -> None:
    import anthropic

    server = Server(CALL)

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        server.engine.answer = f"It is sunny in {city}."
        return "sunny"

    runner = server.anthropic.beta.messages.tool_runner(
        model="fake", messages=ASK, max_tokens=200, tools=[weather]
    )
    last: Any = [message async for message in runner][-1]
    assert last.content[0].text == "It is sunny in Bern."


async def test_anthropics_lists_and_errors(server: Server) -> None:
    import anthropic

    models = await server.anthropic.models.list()
    assert [(m.id, m.display_name, m.type) for m in models.data] == [("fake", "fake", "model")]
    assert (await server.anthropic.models.retrieve("fake")).created_at.year > 2000
    with pytest.raises(anthropic.NotFoundError):
        await server.anthropic.models.retrieve("other")
    lost = (await server.http.post("/v1/messages/nothing")).json()
    assert lost["type"] == "error"
    assert lost["error"]["type"] == "not_found_error"


# Responses.

CODEX: list[dict[str, Any]] = [
    {"include": ["reasoning.encrypted_content"]},
    {"text": {"verbosity": "low"}},
    {"truncation": "auto"},
    {"reasoning": {"effort": "low", "summary": "detailed"}},
    {"extra_body": {"client_metadata": {"a": "b"}}},
    {"service_tier": "flex"},
    {"extra_body": {"top_k": 5, "seed": 3, "repetition_penalty": 1.1, "stop": ["x"]}},
]


@pytest.mark.parametrize("extra", CODEX, ids=lambda extra: json.dumps(extra)[:40])
async def test_extras_of_codex(server: Server, extra: dict[str, Any]) -> None:
    assert (await server.response(**extra)).output_text == "Hello"
    if "top_k" in extra.get("extra_body", {}):
        assert server.engine.seen[-1][1].top_k == 5


async def test_input_items_have_pages(server: Server) -> None:
    asked: Any = [{"role": "user", "content": f"turn {place}"} for place in range(5)]
    made = await server.response(input=asked)
    listed = server.openai.responses.input_items.list
    first = await listed(made.id, limit=2)
    texts = [item.content[0].text for item in first.data]  # type: ignore[union-attr]
    assert texts == ["turn 4", "turn 3"]
    assert first.has_more
    everything = [item async for item in await listed(made.id, limit=2, order="asc")]
    assert len({item.id for item in everything}) == 5
    assert all(item.type == "message" for item in everything)
    for item in everything:
        item.model_dump(warnings="error")
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "none"}):
        reply = await server.http.get(f"/v1/responses/{made.id}/input_items", params=wrong)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] in wrong


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client over a real connection: the transport above hands out whole answers alone."""
    config = uvicorn.Config(server.app, port=0, log_level="error", lifespan="off")
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
        yield client
    running.should_exit = True
    await task


async def test_background_work_is_streamed_and_taken_up_again(server: Server) -> None:
    server.engine.delay = 0.05
    async with listening(server) as client:
        await _take_up_again(client)


async def _take_up_again(client: openai.AsyncOpenAI) -> None:
    stream = await client.responses.create(model="fake", input="hi", background=True, stream=True)
    first = []
    async for event in stream:
        first.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    name = first[0].response.id
    rest = [
        event
        async for event in await client.responses.retrieve(
            name, stream=True, starting_after=first[-1].sequence_number
        )
    ]
    numbers = [event.sequence_number for event in (*first, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.completed"
    again = [event async for event in await client.responses.retrieve(name, stream=True)]
    assert again[-1].type == "response.completed"
    assert again[-1].response.output_text == "Hello"


async def test_counting_and_what_is_not_there(server: Server) -> None:
    counted = await server.openai.responses.input_tokens.count(model="fake", input="hi")
    used = (await server.response()).usage
    assert counted.input_tokens == used.input_tokens
    assert (await server.http.post("/v1/responses/compact", json={})).status_code == 404


async def test_langchain_ends_its_loop() -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    server = Server(PLAIN)
    model = ChatOpenAI(
        model="fake",
        api_key="x",
        base_url="http://test/v1",
        http_async_client=server.http,
    ).bind_tools([WEATHER], strict=None)  # type: ignore[arg-type]
    asked = HumanMessage("Weather in Bern?")
    called = await model.ainvoke([asked])
    assert isinstance(called, AIMessage)
    (call,) = called.tool_calls
    assert call["args"] == {"city": "Bern"}
    server.engine.answer = "Sunny."
    done = await model.ainvoke([asked, called, ToolMessage("sunny", tool_call_id=call["id"])])
    assert done.content == "Sunny."
