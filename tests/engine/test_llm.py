"""The blocking face and the executors, on a tiny real model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import FAKE, OPTIONS, continuation
from safetensors.numpy import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.base.errors import (
    ContextOverflow,
    EngineDead,
    InvalidRequest,
    ModelFileError,
    OptionError,
)
from headrace.base.request import RequestOutput
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.ranks.multiproc import MultiprocExecutor
from tiny import bytewise

PROMPTS = ["one", "The quick brown fox", "def f(x):\n    return", "ä", "0123456789" * 9]


@pytest.fixture(scope="module")
def llm(tiny: Any) -> Iterator[LLM]:
    with LLM(str(tiny), **OPTIONS) as opened:
        yield opened


def greedy(tokens: int = 24, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **fields)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_paths_are_paths(tiny: Path, tmp_path: Path) -> None:
    with LLM(Path(tiny), **OPTIONS, cache_dir=tmp_path) as opened:
        assert opened.generate("one", greedy(1))[0].finished
        assert opened.options.cache_dir == str(tmp_path)


def test_results_come_in_order_and_do_not_depend_on_the_batch(llm: LLM) -> None:
    together = llm.generate(PROMPTS, greedy())
    alone = [llm.generate(prompt, greedy())[0] for prompt in PROMPTS]
    assert [output.prompt for output in together] == PROMPTS
    assert ids(together) == ids(alone)
    for output in together:
        assert output.finished
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 24
        # The ids begin in the middle of a text; half a character at the end is U+FFFD.
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


@pytest.mark.parametrize("executor", ["inline", "multiproc"])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_executor_and_depth_gives_the_same(
    llm: LLM, options: dict[str, Any], executor: str, depth: int
) -> None:
    wanted = [greedy(5 + 7 * place, logprobs=2) for place in range(len(PROMPTS))]
    expected = llm.generate(PROMPTS, wanted)
    with LLM(**{**options, "executor": executor, "depth": depth}) as other:
        got = other.generate(PROMPTS, wanted)
        assert isinstance(other._engine.core.executor, MultiprocExecutor) == (
            executor == "multiproc"
        )
    assert ids(got) == ids(expected)
    assert [g.outputs[0].logprobs for g in got] == [e.outputs[0].logprobs for e in expected]


def test_the_asyncio_engine_gives_the_same(llm: LLM, options: dict[str, Any]) -> None:
    async def run() -> list[RequestOutput]:
        async with await AsyncEngine.start(**options) as engine:
            return await asyncio.gather(*(engine.generate(p, greedy()) for p in PROMPTS))

    assert ids(asyncio.run(run())) == ids(llm.generate(PROMPTS, greedy()))


def test_two_in_one_process_turn_by_turn(llm: LLM, options: dict[str, Any]) -> None:
    expected = ids(llm.generate(PROMPTS, greedy(8)))
    with LLM(**{**options, "max_context": 128}) as other:
        for _ in range(2):
            assert ids(other.generate(PROMPTS, greedy(8))) == expected
            assert ids(llm.generate(PROMPTS, greedy(8))) == expected


def test_forms_of_a_prompt(llm: LLM) -> None:
    tokens = list(b"one")
    expected = ids(llm.generate("one", greedy()))[0]
    for prompt in (tokens, {"prompt": "one"}, {"prompt_token_ids": tokens}, tuple(tokens)):
        assert ids(llm.generate(prompt, greedy()))[0] == expected  # type: ignore[arg-type]
    assert ids(llm.generate([tokens, {"prompt": "one"}], greedy())) == [expected, expected]
    assert llm.generate([], greedy()) == []


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    output = llm.chat(conversation, greedy())[0]
    assert output.prompt == "<user>Hi<|end|><assistant>"
    assert output.prompt_token_ids[8] == bytewise.END
    assert (
        ids(llm.chat([conversation, conversation], greedy()))
        == [list(output.outputs[0].token_ids)] * 2
    )
    own = llm.chat(conversation, greedy(), template="{{ messages[0]['content'] }}!")[0]
    assert own.prompt == "Hi!"


def test_a_conversation_that_the_template_refuses_is_named(llm: LLM) -> None:
    strict = "{{ messages[0]['content'] or raise_exception('nothing was said') }}"
    good, bad = ([{"role": "user", "content": text}] for text in ("Hi", ""))
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]: .*nothing was said"):
        llm.chat([good, bad], greedy(), template=strict)
    with pytest.raises(InvalidRequest, match="nothing was said") as alone:
        llm.chat(bad, greedy(), template=strict)
    assert "messages[" not in str(alone.value)
    with pytest.raises(InvalidRequest, match="1 priorities for 2 prompts"):
        llm.chat([good, good], greedy(), priority=[1])


def test_seeded_sampling_is_a_function_of_the_prompt(llm: LLM) -> None:
    sampling = SamplingParams(temperature=1.3, seed=11, max_tokens=16, ignore_eos=True, n=2)
    alone = llm.generate("one", sampling)[0]
    among = llm.generate([*PROMPTS, *PROMPTS], sampling)[0]
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in among.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids


def test_logprobs(llm: LLM) -> None:
    output = llm.generate("The quick", greedy(6, logprobs=3, prompt_logprobs=2))[0]
    entries = output.outputs[0].logprobs
    assert entries is not None
    for token, entry in zip(output.outputs[0].token_ids, entries, strict=True):
        assert entry.rank == 1
        assert entry.top_ids[0] == token
        assert len(entry.top_ids) == 3
        assert entry.logprob == entry.top_logprobs[0] <= 0.0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None


def test_prefix_cache_is_reported_and_changes_nothing(llm: LLM) -> None:
    prompt = list(range(1, 129))
    first, second = (llm.generate(prompt, greedy())[0] for _ in range(2))
    assert second.cached_tokens >= 96
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_stop_string_and_on_delta(llm: LLM) -> None:
    whole = llm.generate("one", greedy(40))[0].outputs[0]
    stop = whole.text[6:8]
    seen: list[str] = []
    output = llm.generate(
        "one", greedy(40, stop=[stop]), on_delta=lambda delta: seen.append(delta.text)
    )[0].outputs[0]
    assert output.text == whole.text[: whole.text.index(stop)]
    assert "".join(seen) == output.text
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert llm.generate("one", greedy(4))[0].outputs[0].finish_reason == "length"


def test_more_prompts_than_may_wait(options: dict[str, Any]) -> None:
    with LLM(worker=FAKE, **{**options, "max_sequences": 4, "max_waiting": 2}) as small:
        outputs = small.generate([[65, place % 200] for place in range(700)], greedy(3))
        for place, output in enumerate(outputs):
            assert output.outputs[0].token_ids == continuation([65, place % 200], 3)
        small._engine.core.scheduler.check_integrity()


def test_bad_prompts_are_named_by_place_and_nothing_is_left(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"prompts\[1\].*empty"):
        llm.generate(["one", ""], greedy())
    with pytest.raises(ContextOverflow):
        llm.generate([1] * 512, greedy())
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        llm.generate({"text": "one"}, greedy())
    with pytest.raises(InvalidRequest, match="2 sampling_params for 1"):
        llm.generate("one", [greedy(), greedy()])
    with pytest.raises(OptionError, match="device"):
        LLM(device="tpu")
    assert not llm._engine.core.has_work


def test_an_exception_in_the_middle_frees_everything(llm: LLM) -> None:
    def stop(delta: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(100), on_delta=stop)
    core = llm._engine.core
    assert not core.has_work
    core.scheduler.check_integrity()
    assert core.scheduler.stats().kv_usage == 0.0
    assert llm.generate("one", greedy(4))[0].finished


def test_threads_take_turns(llm: LLM) -> None:
    expected = ids(llm.generate(PROMPTS, greedy(8)))
    results: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: results.append(ids(llm.generate(PROMPTS, greedy(8)))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_a_progress_bar_on_request(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, greedy(4))
    assert capfd.readouterr().err == ""
    llm.generate(PROMPTS, greedy(4), use_tqdm=True)
    assert "5 of 5 requests" in capfd.readouterr().err


def test_closed(options: dict[str, Any]) -> None:
    closed = LLM(worker=FAKE, **options)
    closed.close()
    closed.close()
    with pytest.raises(InvalidRequest, match="closed"):
        closed.generate("one", greedy())


def test_a_dead_worker_process_is_an_error_at_once(options: dict[str, Any]) -> None:
    from engine_fakes import CRASH

    with LLM(worker=FAKE, **{**options, "executor": "multiproc"}) as dying:
        assert dying.generate([65], greedy(3))[0].outputs[0].token_ids == continuation([65], 3)
        with pytest.raises(EngineDead, match="exited with code 9"):
            dying.generate([65, CRASH], greedy(3))
        with pytest.raises(EngineDead, match="exited with code 9"):
            dying.generate([65], greedy(3))


def test_closing_ends_a_call_of_another_thread(options: dict[str, Any]) -> None:
    llm = LLM(**options)
    working, ended = threading.Event(), []

    def hold(_: Any) -> None:
        """The call is in the midst of its work when the other thread has begun to close."""
        working.set()
        while not llm._closing:
            time.sleep(0.005)

    def work() -> None:
        try:
            llm.generate(["long"] * 8, greedy(400), on_delta=hold)
        except EngineDead as error:
            ended.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert working.wait(300)
    llm.close()
    thread.join(300)
    assert not thread.is_alive()
    assert ended
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate("more", greedy(1))


def test_a_callback_cannot_make_a_call(llm: LLM) -> None:
    def again(_: Any) -> None:
        llm.generate("inner", greedy(2))

    with pytest.raises(InvalidRequest, match="on_delta"):
        llm.generate("outer", greedy(2), on_delta=again)
    assert len(ids(llm.generate("after", greedy(2)))[0]) == 2


def test_a_callback_may_close(options: dict[str, Any]) -> None:
    llm = LLM(**options)
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("one", greedy(50), on_delta=lambda _: llm.close())
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate("more", greedy(1))


FORKING = """
import os, sys, signal
from headrace import LLM, SamplingParams
from headrace.base.errors import InvalidRequest

llm = LLM(**{options!r})
before = llm.generate("one", SamplingParams(max_tokens=2))
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        llm.generate("one", SamplingParams(max_tokens=2))
    except InvalidRequest as error:
        assert "fork" in error.message, error
        llm.close()
        sys.exit(7)
    sys.exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
llm.generate("one", SamplingParams(max_tokens=2))
llm.close()
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_is_told(options: dict[str, Any], threads: int) -> None:
    code = FORKING.format(options={**options, "threads": threads})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["7"]), done.stderr


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threads", 100_000),
        ("threads", 257),
        ("threads", 1.5),
        ("max_context", "100"),
        ("block_size", None),
        ("kv_memory", 10**6),
        ("prefix_cache", 1),
    ],
)
def test_options_of_a_wrong_kind_are_named(
    options: dict[str, Any], field: str, value: object
) -> None:
    with pytest.raises(OptionError, match=f"^{field} must be") as caught:
        LLM(**{**options, field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("prompt", [None, [1.5], 7, [None], [[1, "a"]]])
def test_prompts_of_a_wrong_kind_are_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(prompt, greedy(1))


def test_the_defaults_of_vllm_are_taken(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert llm.generate("one", params)[0].finished
    for wrong in (
        {"stop": 5},
        {"stop_token_ids": 5},
        {"logit_bias": [1]},
        {"stop_token_ids": [1] * 1025},
    ):
        with pytest.raises(InvalidRequest, match=r"stop|logit_bias"):
            llm.generate("one", SamplingParams(max_tokens=1, **wrong))


def test_weights_that_are_no_numbers_are_refused_at_the_start(tmp_path: Any) -> None:
    folder = bytewise.make(tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="NaN"):
        LLM(str(folder), **OPTIONS)


def test_a_vocabulary_of_four(tmp_path: Any) -> None:
    folder = bytewise.make(tmp_path / "few")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 4, "eos_token_id": 3}))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:4].copy()
    save_file(weights, folder / "model.safetensors")
    with LLM(str(folder), **OPTIONS) as llm:
        assert len(ids(llm.generate([[0, 1, 2]], greedy(3)))[0]) == 3
