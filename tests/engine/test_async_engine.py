"""The asyncio face with a fake worker in a real engine process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import CRAWL, FAKE, HOLD_START, LET_GO, SLOW, continuation
from engine_waits import until

from headrace.base.errors import (
    ContextOverflow,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
)
from headrace.base.request import RequestOutput, StepStats
from headrace.base.sampling import SamplingParams
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.supervision import Supervision


@pytest.fixture
async def engine(
    options: dict[str, Any], supervision: Supervision, notes: Path
) -> AsyncIterator[AsyncEngine]:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as started:
        yield started


def greedy(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, **fields)


def text_of(ids: list[int]) -> str:
    return bytes(ids).decode()


async def quiet(engine: AsyncEngine) -> None:
    """Nothing is held any more, in either process."""
    for _ in range(5000):
        report = await engine.inspect()
        assert report.integrity == ""
        if report.running == report.waiting == 0:
            break
        await asyncio.sleep(0.02)
    assert (report.running, report.waiting, report.kv_usage) == (0, 0, 0.0)
    assert not engine.in_work()
    assert engine._work.sequences == 0


async def test_streams_what_the_worker_says(engine: AsyncEngine) -> None:
    prompt = [65, 66, 67]
    deltas = [delta async for delta in engine.stream(prompt, greedy(20))]
    expected = continuation(prompt, 20)
    assert [token for delta in deltas for token in delta.token_ids] == expected
    assert "".join(delta.text for delta in deltas) == text_of(expected)
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert deltas[-1].finish_reason == "length"
    assert deltas[0].prompt_tokens == 3
    assert 0.0 < deltas[0].queue_seconds < 600.0
    await quiet(engine)


async def test_a_text_prompt_is_tokenised(engine: AsyncEngine) -> None:
    answer = await engine.generate("hello", greedy(5))
    assert answer.prompt == "hello"
    assert answer.prompt_token_ids == list(b"hello")
    assert answer.outputs[0].token_ids == continuation(list(b"hello"), 5)
    assert answer.finished


async def test_many_at_once_each_get_their_own(engine: AsyncEngine) -> None:
    prompts = [[65 + i % 20, 66, 67 + i % 7, i % 250] for i in range(200)]
    answers = await asyncio.gather(
        *(engine.generate(prompt, greedy(10 + i % 9)) for i, prompt in enumerate(prompts))
    )
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.outputs[0].token_ids == continuation(prompt, 10 + i % 9)
    await quiet(engine)


async def test_n_choices_and_logprobs(engine: AsyncEngine) -> None:
    answer = await engine.generate(
        [70] * 40, SamplingParams(n=3, max_tokens=6, logprobs=1, prompt_logprobs=1)
    )
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    for output in answer.outputs:
        assert len(output.token_ids) == 6
        assert output.logprobs is not None
        assert [entry.top_ids for entry in output.logprobs] == [[i] for i in output.token_ids]
        assert output.finish_reason == "length"
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == 40
    assert answer.prompt_logprobs[0] is None
    assert all(entry is not None for entry in answer.prompt_logprobs[1:])
    await quiet(engine)


async def test_stop_string_ends_the_text_and_the_work(engine: AsyncEngine) -> None:
    prompt = [65, 66, 67]
    text = text_of(continuation(prompt, 60))
    stop = text[10:13]
    place = text.index(stop)
    answer = await engine.generate(prompt, greedy(400, stop=[stop]))
    output = answer.outputs[0]
    assert output.text == text[:place]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == continuation(prompt, place + 3)
    shown = await engine.generate(prompt, greedy(400, stop=[stop], include_stop_str_in_output=True))
    assert shown.outputs[0].text == text[: place + 3]
    await quiet(engine)


async def test_stop_ids(engine: AsyncEngine) -> None:
    prompt = [65, 66, 67]
    ids = continuation(prompt, 60)
    stop = ids[8]
    first = ids.index(stop)
    output = (await engine.generate(prompt, greedy(60, stop_token_ids=[stop]))).outputs[0]
    assert output.token_ids == ids[: first + 1]
    assert output.text == text_of(ids[:first])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "param"),
    [
        ("", {}, InvalidRequest, "prompt"),
        ([], {}, InvalidRequest, "prompt"),
        ([1, 320], {}, InvalidRequest, "prompt"),
        ([1, -1], {}, InvalidRequest, "prompt"),
        ([1, True], {}, InvalidRequest, "prompt"),
        ([1, 2.0], {}, InvalidRequest, "prompt"),
        (b"ab", {}, InvalidRequest, "prompt"),
        (None, {}, InvalidRequest, "prompt"),
        ("\ud800", {}, InvalidRequest, "prompt"),
        ([1] * 512, {}, ContextOverflow, "prompt"),
        ([1] * 500, {"max_tokens": 13}, ContextOverflow, "max_tokens"),
        ([1] * 500, {"max_tokens": None, "min_tokens": 13}, ContextOverflow, "min_tokens"),
        ([1], {"temperature": float("nan")}, InvalidRequest, "temperature"),
        ([1], {"n": 0}, InvalidRequest, "n"),
        ([1], {"n": "2"}, InvalidRequest, "n"),
        ([1], {"stop_token_ids": [320]}, InvalidRequest, "stop_token_ids"),
        ([1], {"logit_bias": {999: 1.0}}, InvalidRequest, "logit_bias"),
    ],
)
async def test_bad_input_is_named_before_any_work(
    engine: AsyncEngine, prompt: Any, fields: dict[str, Any], error: type[Exception], param: str
) -> None:
    with pytest.raises(error) as caught:
        engine.submit(prompt, SamplingParams(**fields))
    assert caught.value.param == param  # type: ignore[attr-defined]
    assert not engine.in_work()


async def test_what_the_worker_cannot_do_is_refused_at_the_door(engine: AsyncEngine) -> None:
    assert engine.features == frozenset()
    with pytest.raises(InvalidRequest, match="no support") as caught:
        engine.submit([1], greedy(5), grammar="x")
    assert caught.value.param == "grammar"
    with pytest.raises(NotFound, match="no adapter 'x' is loaded"):
        engine.submit([1], greedy(5), adapter="x")


async def test_an_id_is_taken_once(engine: AsyncEngine) -> None:
    stream = engine.submit([1], greedy(5), request_id="a")
    with pytest.raises(InvalidRequest, match="is in work"):
        engine.submit([1], greedy(5), request_id="a")
    assert [token async for delta in stream for token in delta.token_ids]
    assert (await engine.generate([1], greedy(5), request_id="a")).finished


async def test_max_tokens_none_fills_the_context(engine: AsyncEngine) -> None:
    answer = await engine.generate([66] * 400, greedy(1).__class__(max_tokens=None, temperature=0))
    assert len(answer.outputs[0].token_ids) == engine.max_context - 400
    assert answer.outputs[0].finish_reason == "length"


async def test_the_callers_params_are_not_changed(engine: AsyncEngine) -> None:
    sampling = SamplingParams(max_tokens=None)
    await engine.generate([66] * 500, sampling)
    assert sampling.max_tokens is None


async def test_leaving_a_stream_frees_everything(engine: AsyncEngine) -> None:
    stream = engine.stream([65, CRAWL], greedy(400))
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await quiet(engine)


async def test_cancelling_a_task_frees_everything(engine: AsyncEngine) -> None:
    begun = 0

    async def read() -> None:
        nonlocal begun
        async for _ in engine.stream([65, CRAWL], greedy(400)):
            begun += 1

    tasks = [asyncio.create_task(read()) for _ in range(32)]
    await until(lambda: begun >= 32, "tokens come")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await quiet(engine)


async def test_abort_ends_the_stream_with_a_reason(engine: AsyncEngine) -> None:
    stream = engine.submit([65, CRAWL], greedy(400), request_id="x")
    await anext(stream)
    assert engine.abort("x")
    rest = [delta async for delta in stream]
    assert rest[-1].finish_reason == "abort"
    assert not engine.abort("x")
    await quiet(engine)


async def test_abort_storm(engine: AsyncEngine) -> None:
    """Requests that are aborted at every moment of their life, among others that go on."""

    async def one(place: int) -> RequestOutput | None:
        if place % 3 == 0:
            return await engine.generate([65, place % 256], greedy(30))
        stream = engine.submit([65, place % 256], greedy(200))
        await asyncio.sleep(0.0007 * (place % 40))
        stream.cancel()
        return None

    answers = await asyncio.gather(*(one(place) for place in range(300)))
    for place in range(0, 300, 3):
        answer = answers[place]
        assert answer is not None
        assert answer.outputs[0].token_ids == continuation([65, place % 256], 30)
    await quiet(engine)


async def test_a_slow_reader_holds_one_delta(engine: AsyncEngine, notes: Path) -> None:
    prompt = [65, CRAWL]
    stream = engine.submit(prompt, greedy(300))
    first = await anext(stream)
    (notes / LET_GO).touch()
    await until(lambda: stream.ended, "all tokens came")
    assert len(stream._pending) == 1
    rest = [delta async for delta in stream]
    assert len(rest) == 1
    assert first.token_ids + rest[0].token_ids == continuation(prompt, 300)
    assert rest[0].finish_reason == "length"


async def test_many_unread_streams_take_little_memory(engine: AsyncEngine) -> None:
    await engine.generate([65], greedy(50))
    gc.collect()
    tracemalloc.start()
    streams = [engine.submit([65, i], greedy(200)) for i in range(50)]
    await until(lambda: all(stream.ended for stream in streams), "all tokens came")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 10,000 tokens: as ids in a list 8 bytes each, as objects per token it would be megabytes.
    assert held < 1_000_000
    for stream in streams:
        assert len([token async for delta in stream for token in delta.token_ids]) == 200


async def test_overload_is_refused_with_a_time(
    options: dict[str, Any], supervision: Supervision
) -> None:
    small = {**options, "max_sequences": 2, "max_waiting": 3}
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **small) as engine:
        streams = [engine.submit([65, SLOW], greedy(50)) for _ in range(5)]
        with pytest.raises(Overloaded) as caught:
            engine.submit([65], greedy(5))
        assert caught.value.retry_after is not None
        assert caught.value.status == 503
        for stream in streams:
            assert len([token async for d in stream for token in d.token_ids]) == 50
        assert (await engine.generate([65], greedy(5))).finished
        await quiet(engine)


async def test_statistics_reach_subscribers_and_a_bad_one_hurts_nobody(
    engine: AsyncEngine,
) -> None:
    seen: list[StepStats] = []

    def bad(stats: StepStats) -> None:
        raise ValueError("no")

    end = engine.subscribe(seen.append)
    engine.subscribe(bad)
    answer = await engine.generate([65], greedy(20))
    assert answer.outputs[0].token_ids == continuation([65], 20)
    assert sum(stats.sampled_tokens for stats in seen) == 20
    assert {stats.running for stats in seen[:-1]} == {1}
    assert seen[-1].running == 0
    end()
    count = len(seen)
    await engine.generate([65], greedy(5))
    assert len(seen) == count


async def test_close_drains(options: dict[str, Any], supervision: Supervision) -> None:
    engine = await AsyncEngine.start(worker=FAKE, supervision=supervision, **options)
    tasks = [asyncio.create_task(engine.generate([65, SLOW, i], greedy(30))) for i in range(8)]
    await until(lambda: any(life.generated for _, life in engine.in_work()), "begun")
    closing = asyncio.create_task(engine.close(drain_seconds=300.0))
    await asyncio.sleep(0)
    assert not engine.health().ready
    with pytest.raises(Overloaded, match="shutting down"):
        engine.submit([65], greedy(5))
    answers = await asyncio.gather(*tasks)
    assert all(len(answer.outputs[0].token_ids) == 30 for answer in answers)
    await closing


async def test_close_ends_what_does_not_finish_in_time(
    options: dict[str, Any], supervision: Supervision
) -> None:
    engine = await AsyncEngine.start(worker=FAKE, supervision=supervision, **options)
    task = asyncio.create_task(engine.generate([65, CRAWL], greedy(400)))
    await until(lambda: any(life.generated for _, life in engine.in_work()), "begun")
    pid = engine.engine_pid
    await engine.close(drain_seconds=0.1)
    assert (await task).outputs[0].finish_reason == "abort"
    assert pid is not None
    with contextlib.suppress(ProcessLookupError):
        import os

        os.kill(pid, 0)
        pytest.fail("the engine process is still there")


async def test_two_engines_in_one_process(
    options: dict[str, Any], supervision: Supervision
) -> None:
    async with (
        await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as one,
        await AsyncEngine.start(
            worker=FAKE, supervision=supervision, **{**options, "max_context": 64}
        ) as two,
    ):
        assert (one.max_context, two.max_context) == (512, 64)
        answers = await asyncio.gather(
            *(engine.generate([65, i], greedy(20)) for i in range(10) for engine in (one, two))
        )
        for place, answer in enumerate(answers):
            assert answer.outputs[0].token_ids == continuation([65, place // 2], 20)
        assert one.registry is not two.registry
        with pytest.raises(ContextOverflow):
            two.submit([1] * 64, greedy(1))


async def test_a_start_that_cannot_work_says_why(
    options: dict[str, Any], supervision: Supervision
) -> None:
    with pytest.raises(ModelNotFound):
        await AsyncEngine.start(worker=FAKE, **{**options, "model": "/no/such/model-xyz"})
    from headrace.base.errors import DoesNotFit, OptionError

    with pytest.raises(DoesNotFit):
        await AsyncEngine.start(
            worker=FAKE,
            supervision=supervision,
            **{**options, "kv_memory": "64KiB", "max_context": 512},
        )
    with pytest.raises(OptionError, match="cuda"):
        await AsyncEngine.start(
            worker=FAKE, supervision=supervision, **{**options, "device": "cuda"}
        )


async def test_ready_later(options: dict[str, Any], supervision: Supervision, notes: Path) -> None:
    (notes / HOLD_START).touch()
    engine = await AsyncEngine.start(worker=FAKE, supervision=supervision, wait=False, **options)
    try:
        assert not engine.health().ready
        assert engine.health().alive
        with pytest.raises(Overloaded) as caught:
            engine.submit([65], greedy(5))
        assert caught.value.retry_after is not None
        (notes / HOLD_START).unlink()
        await until(lambda: engine.health().ready, "ready")
        answer = await engine.generate([65], greedy(5))
        assert answer.outputs[0].token_ids == continuation([65], 5)
        assert {"open_files", "tokenizer", "engine_process", "first_token"} <= set(engine.phases)
        names = {decision.name for decision in engine.decisions}
        assert {"device", "dtype", "kv_memory"} <= names
    finally:
        await engine.close()


async def test_an_idle_engine_keeps_beating(engine: AsyncEngine) -> None:
    channel = engine._supervisor._channel
    assert channel is not None
    for beat in range(3):
        last = channel.received_at
        await until(lambda last=last: channel.received_at > last, f"beat {beat}")  # type: ignore[misc]
    assert engine.health().ready
