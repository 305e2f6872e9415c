"""The official client against a real server process with a real engine on a tiny model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from processes import Running, serving

from tiny import talker
from tiny.kept import Kept

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "Where does the water go?"}]


@pytest.fixture(scope="module")
def server(kept: Kept) -> Iterator[Running]:
    model = kept(talker.make)
    with serving(model, "--max-sequences 8 --kv-memory 16MiB") as server:
        yield server


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.openai(timeout=120)


@pytest.fixture
async def later(server: Running) -> Any:
    client = openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120
    )
    async with client:
        yield client


def chat(client: openai.OpenAI, **more: Any) -> Any:
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0} | more
    return client.chat.completions.create(**given)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_chat_whole_and_streamed_are_equal(client: openai.OpenAI) -> None:
    whole = chat(client)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_completions_of_text_and_ids_agree(client: openai.OpenAI, server: Running) -> None:
    text = "The headrace carries"
    first = client.completions.create(model="tiny", prompt=text, max_tokens=8, temperature=0)
    ids = httpx.post(
        server.url + "/v1/completions",
        json={"prompt": text, "max_tokens": 1, "echo": True, "return_token_ids": True},
    ).json()["choices"][0]["token_ids"][:-1]
    second = client.completions.create(model="tiny", prompt=ids, max_tokens=8, temperature=0)
    assert first.choices[0].text == second.choices[0].text


def test_n_answers_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        reply = chat(client, n=4, temperature=1.0, seed=seed)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        return [choice.message.content for choice in reply.choices]

    first = texts(1)
    assert len(set(first)) == 4
    assert texts(1) == first
    assert texts(2) != first


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = chat(client, max_tokens=40).choices[0].message.content
    stop = text[8:11]
    cut = chat(client, max_tokens=40, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop
    streamed = chat(client, max_tokens=40, stop=[stop], stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == text[: text.index(stop)]
    kept = chat(client, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == text[: text.index(stop) + len(stop)]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    reply = chat(client, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert len(content) == 12
    assert b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "replace") == (
        reply.choices[0].message.content
    )
    for entry in content:
        assert len(entry.top_logprobs) == 3
        # Greedy: the chosen token is the most likely.
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert entry.token == entry.top_logprobs[0].token


def test_completion_echo_and_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt="the water", max_tokens=3, temperature=0, echo=True, logprobs=2
    )
    choice = reply.choices[0]
    assert choice.text.startswith("the water")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens or ()) == len(choice.logprobs.text_offset or ())


def test_the_same_prompt_is_cached(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "water and turbine " * 12}]
    chat(client, messages=long, max_tokens=1)
    again = chat(client, messages=long, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= 16


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": "a b c " * 2000}]},
            openai.BadRequestError,
            "messages",
        ),
        ({"messages": [{"role": "user", "content": "raise"}]}, openai.BadRequestError, "messages"),
        ({"logit_bias": {str(talker.VOCAB): 1}}, openai.BadRequestError, "logit_bias"),
    ],
    ids=str,
)
def test_errors(client: openai.OpenAI, change: Any, error: Any, param: str) -> None:
    with pytest.raises(error) as caught:
        chat(client, **change)
    assert caught.value.param == param


async def test_greedy_is_the_same_alone_and_among_thirty_one(
    client: openai.OpenAI, later: openai.AsyncOpenAI
) -> None:
    alone = chat(client, max_tokens=24).choices[0].message.content

    async def ask(number: int) -> Any:
        content = MESSAGES if number == 17 else [{"role": "user", "content": f"{number} " * number}]
        return await later.chat.completions.create(
            model="tiny", messages=content, max_tokens=24, temperature=0 if number == 17 else 1
        )

    replies = await asyncio.gather(*(ask(number) for number in range(1, 33)))
    assert replies[16].choices[0].message.content == alone


async def test_thirty_two_streams_with_disconnects_free_every_block(
    server: Running, later: openai.AsyncOpenAI
) -> None:
    async def stream(number: int) -> int:
        reply = await later.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"count {number}"}],
            max_tokens=60,
            stream=True,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
        count = 0
        async for chunk in reply:
            count = chunk.usage.completion_tokens if chunk.usage else count
            if number % 2 and chunk.choices and chunk.choices[0].delta.content:
                await reply.close()
                break
        return count

    counts = await asyncio.gather(*(stream(number) for number in range(32)))
    assert counts[::2] == [60] * 16
    end = time.monotonic() + 120
    wanted = {
        "vllm:num_requests_running": 0.0,
        "vllm:num_requests_waiting": 0.0,
        "vllm:kv_cache_usage_perc": 0.0,
        "headrace_http_requests_in_work": 0.0,
    }
    while gauges(server, set(wanted)) != wanted:
        assert time.monotonic() < end, gauges(server, set(wanted))
        await asyncio.sleep(0.2)


def gauges(server: Running, names: set[str]) -> dict[str, float]:
    found = {}
    for line in httpx.get(server.url + "/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if name in names:
            found[name] = float(value)
    return found


def test_the_ready_line_tells_the_phases(server: Running) -> None:
    line = next(line for line in server.lines if line.startswith("ready:"))
    assert "tiny on http://127.0.0.1:" in line
    assert " s (" in line
