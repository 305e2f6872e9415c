"""A model shared by processes, behind the same faces: the same answers, and one end."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import OPTIONS

from headrace import LLM, SamplingParams
from headrace.base.errors import EngineDead, OptionError
from headrace.base.request import Request
from headrace.base.spec import RequestSpec
from headrace.base.step import DraftCosts, Drafting
from headrace.engine.loop import prediction
from headrace.engine.loop.build import Built
from headrace.engine.ranks import group
from headrace.engine.ranks.ends import SpawnedEnd
from headrace.engine.ranks.group import GroupExecutor
from headrace.kernels.dealing import STEPS, Dealing
from headrace.sched import Scheduler
from headrace.sched.price import DraftCounts, StepPrices
from headrace.text.grammar import from_regex
from tiny import bytewise, families
from tiny.kept import Kept

PROMPTS = ["one", "The quick brown fox", "def f(x):\n    return", "0123456789" * 9]
WISHES = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=24, ignore_eos=True, n=2),
    SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.2, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def model(kept: Kept) -> Path:
    return kept(bytewise.make)


def opened(model: Path, cache: Path, **options: Any) -> LLM:
    return LLM(str(model), **{**OPTIONS, "cache_dir": str(cache), "threads": 2, **options})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def shared(model: Path, cache: Path) -> Iterator[LLM]:
    with opened(model, cache, layout="TP2") as llm:
        yield llm


def answers(llm: LLM) -> list[Any]:
    return [
        [(choice.token_ids, choice.logprobs, output.prompt_logprobs) for choice in output.outputs]
        for wish in WISHES
        for output in llm.generate(PROMPTS, wish)
    ]


def test_two_processes_answer_as_one(shared: LLM, model: Path, cache: Path) -> None:
    with opened(model, cache) as alone:
        assert answers(shared) == answers(alone)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("PP2", {}),
        ("PP2", {"max_sequences": 2}),
        ("PP2", {"step_tokens": 16}),
        ("TP2.PP2", {}),
        ("TP2.PP2", {"step_tokens": 16}),
    ],
)
def test_two_stages_answer_as_one(
    model: Path, cache: Path, layout: str, options: dict[str, Any]
) -> None:
    """Several steps are in flight: more sequences than rows, chunks, one at a time."""
    with opened(model, cache, **options) as alone:
        expected = answers(alone)
    with opened(model, cache, layout=layout, **options) as staged:
        assert answers(staged) == expected
        test_a_grammar_is_kept_by_all_ranks(staged)
        (said,) = [one for one in staged.decisions if one.name == "speculate"]
        assert "stages" in said.reason


def test_a_grammar_is_kept_by_all_ranks(shared: LLM) -> None:
    wish = SamplingParams(temperature=1.0, seed=1, max_tokens=16)
    (answer,) = shared.generate(["x"], wish, grammar=from_regex("(ab|cd){3}", "grammar"))
    text = answer.outputs[0].text
    assert len(text) == 6
    assert set(text) <= set("abcd")


def test_the_layout_is_explained(shared: LLM) -> None:
    (said,) = [one for one in shared.decisions if one.name == "layout"]
    assert said.value == "TP2"
    assert "nothing is summed" in said.reason


def test_a_cache_below_them_is_left_out_with_the_reason(model: Path, cache: Path) -> None:
    with opened(model, cache, layout="TP2", context_cache="1GiB") as llm:
        (said,) = [one for one in llm.decisions if one.name == "context_cache"]
        assert said.value == "0"
        assert "ranks" in said.reason


@pytest.mark.parametrize(
    ("layout", "rank"),
    [("TP2", "1 of 2"), ("PP2", "1 of 2"), *(("TP2.PP2", f"{rank} of 4") for rank in (1, 2, 3))],
)
def test_a_killed_rank_is_named(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, layout: str, rank: str
) -> None:
    """By its end: its silence is never waited for."""
    monkeypatch.setattr(group, "SILENT", 1e6)
    with opened(model, cache, layout=layout) as llm:
        executor = llm._engine.core.executor
        assert isinstance(executor, GroupExecutor)
        os.kill(executor._others[int(rank[0]) - 1].end.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match=f"rank {rank} was ended by SIGKILL"):
            llm.generate(["one"], WISHES[0])
        pids = [other.end.pid for other in executor._others]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("layout", ["TP2", "PP2", "TP2.PP2"])
def test_two_hundred_aborts_leave_nothing(model: Path, cache: Path, layout: str) -> None:
    """Waiting, prefilling, decoding, with steps of several stages in flight."""
    with opened(model, cache, layout=layout, max_sequences=16) as llm:
        assert isinstance(llm._built, Built)
        core = llm._built.core
        scheduler = core.scheduler
        assert isinstance(scheduler, Scheduler)
        wanted = llm.generate(["one"], WISHES[0])
        alive: list[str] = []
        number = 0
        while number < 200:
            for _ in range(10):
                prompt = [(number * 31 + place) % 250 for place in range(40)]
                core.add(Request(f"r{number}", prompt, RequestSpec(WISHES[0], seed=number)))
                alive.append(f"r{number}")
                number += 1
            core.turn()
            while len(alive) > 12:
                core.abort(alive.pop(number % 12))
        for request in alive:
            core.abort(request)
        while core.has_work or scheduler.stats().kv_usage:
            core.turn()
        scheduler.check_integrity()
        assert llm.generate(["one"], WISHES[0])[0].outputs == wanted[0].outputs


def test_a_stopped_rank_goes_on_or_is_ended(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others wait for it in the middle of a step, and nobody is told that it stands still."""
    monkeypatch.setattr(group, "SILENT", 1e6)
    with opened(model, cache, layout="TP2") as llm:
        executor = llm._engine.core.executor
        assert isinstance(executor, GroupExecutor)
        end = executor._others[0].end
        assert isinstance(end, SpawnedEnd)
        pid = end.pid
        wanted = llm.generate(["one"], WISHES[0])
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        assert llm.generate(["one"], WISHES[0])[0].outputs == wanted[0].outputs
        pulse = end._child._pulse
        assert pulse is not None
        os.kill(pid, signal.SIGSTOP)
        pulse._silent = 2.0
        with pytest.raises(EngineDead, match="rank 1 of 2 has been silent for 2 s and was ended"):
            llm.generate(["one"], WISHES[0])


@pytest.mark.parametrize("layout", ["TP2", "TP3"])
def test_ranks_draft_alike_whatever_their_clocks_say(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Drafts cost nothing and too much in turns by the clock of rank 0, and something else by
    others': ranks that went by their own would draft for different rows, and end the group."""

    class Free(StepPrices):
        def rising(self, least: int, most: int) -> list[float]:
            return [1.0] * (most - least + 1)

    turns = itertools.cycle([DraftCosts(0.0, 0.0)] * 7 + [DraftCosts(9.0, 9.0)] * 3)

    def learn(counts: DraftCounts, told: Drafting, seconds: float, *, decodes: bool) -> None:
        counts.costs = next(turns)

    monkeypatch.setattr(prediction, "StepPrices", Free)
    monkeypatch.setattr(DraftCounts, "learn", learn)
    with opened(model, cache) as alone:
        wanted = answers(alone)
    told = {"layout": layout, "speculate": "draft", "draft_model": str(model), "threads": 3}
    with opened(model, cache, **told) as llm:
        assert answers(llm) == wanted
        assert llm.stats.draft_tokens > 100
        assert llm.stats.accepted_tokens > 50


def test_the_reference_over_two_processes(kept: Kept, model: Path, cache: Path) -> None:
    """Without records a rank interprets its part."""
    ids = [list(range(40, 60)) * 3, list(range(7))]
    for path, layouts in (
        (model, ("TP2", "PP2")),
        (kept(families.make, "deepseek_v2"), ("TP2", "EP2", "PP2")),
    ):
        found = []
        for layout in ("1", *layouts):
            with opened(path, cache, layout=layout, kernels="ref", speculate="off") as llm:
                outputs = [one for wish in WISHES for one in llm.generate(ids, wish)]
                found.append(
                    [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]
                )
            assert found[-1] == found[0], layout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"layout": "DP2"}, "headrace route"),
        ({"layout": "EP2"}, "no experts"),
        ({"layout": "TP2.EP2.PP2"}, "no experts"),
        ({"layout": "PP64"}, "parts that can be stages"),
        ({"layout": "PP2", "speculate": "ngram"}, "drafts"),
        ({"layout": "TP64"}, "too few"),
        ({"layout": "two"}, "TP2"),
        ({"layout": "TP2", "depth": 2}, "depth 1"),
        ({"layout": "TP2", "keep_packed": False}, "keep_packed"),
        ({"layout": "TP2", "kernels": "triton"}, "no parts of weights"),
        ({"layout": "TP2", "kernels": "ref", "dtype": "bfloat16"}, "float32"),
    ],
)
def test_what_is_not_served_is_refused(
    model: Path, cache: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(OptionError, match=why) as raised:
        opened(model, cache, **options)
    assert raised.value.param == ("speculate" if "speculate" in options else "layout")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v2"])
def test_mixtures_states_and_latents_with_drafts(
    kept: Kept, cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the same prompt, which repeats itself: prefixes are found, drafts verified, and each
    process looks by itself whether another deal is better."""
    looks: list[int] = []
    begin = Dealing.begin
    monkeypatch.setattr(Dealing, "begin", lambda self, at: (looks.append(at), begin(self, at))[1])
    again = list(range(40, 60)) * 6
    found = []
    for layout in ("1", "TP2", "EP2", "EP2.PP2"):
        looks.clear()
        with opened(kept(families.make, name), cache, layout=layout, speculate="auto") as llm:
            wish = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
            outputs = [*llm.generate([again], wish), *llm.generate([again, again[:70]], wish)]
            # Drawn, so that few drafts are right and there are steps enough for a look.
            drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=150, ignore_eos=True)
            outputs += llm.generate([again[:9], again[:5]], drawn)
            found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
        assert found[-1] == found[0], layout
        assert any(at > 0 and at % STEPS == 0 for at in looks) == ("EP" in layout)
