"""Speculation through the engine: the same answers, and refused where nothing can be drafted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.base.config import Decision, EngineOptions
from headrace.base.errors import (
    DoesNotFit,
    HeadraceError,
    InvalidRequest,
    ModelNotFound,
    OptionError,
)
from headrace.base.groups import group_bytes, pool_bytes
from headrace.base.hardware import CpuFacts, GpuFacts, Hardware
from headrace.base.step import DraftCosts
from headrace.engine.loop import prediction, start
from headrace.engine.loop.start import DRAFTS, Resolved, drafts_of, resolve
from headrace.loader import open_model
from headrace.sched import StepPrices
from headrace.speculate import DEFAULT
from headrace.worker.draft_slots import DraftPart
from tiny import bytewise, eagle
from tiny import encoder as encoders
from tiny.kept import Kept

PROMPTS = [
    "a b a b a b a b a",
    "The water turns the turbine and",
    "x = x = x = x = ",
    "zzzzzzzzzzz",
]
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, n=2, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=40, stop=["qu"], repetition_penalty=1.2),
    SamplingParams(temperature=0.3, seed=4, max_tokens=40, min_tokens=20, presence_penalty=0.5),
]


def answers(options: dict[str, Any]) -> list[Any]:
    with LLM(**options) as llm:
        together = llm.generate(PROMPTS, SAMPLINGS)
        alone = [llm.generate([PROMPTS[0]], one)[0] for one in SAMPLINGS]
    return [one.outputs for one in (*together, *alone)]


@pytest.mark.parametrize(("depth", "drafters"), [(1, "auto"), (1, "ngram"), (2, "suffix")])
def test_the_same_answers(options: dict[str, Any], depth: int, drafters: str) -> None:
    options["depth"] = depth
    assert answers({**options, "speculate": drafters}) == answers({**options, "speculate": "off"})


@pytest.fixture
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's steps take as long as its draft model's, so none would pay."""

    class Free(StepPrices):
        def rising(self, least: int, most: int) -> list[float]:
            return [1.0] * (most - least + 1)

    monkeypatch.setattr(prediction, "StepPrices", Free)
    given = property(lambda part: DraftCosts(0.0, 0.0), lambda part, told: None)
    monkeypatch.setattr(DraftPart, "costs", given, raising=False)


@pytest.mark.parametrize(("depth", "drafters"), [(1, "draft"), (2, "auto")])
def test_a_draft_model_changes_no_answer(
    options: dict[str, Any], kept: Kept, depth: int, drafters: str, free_rows: None
) -> None:
    options["depth"] = depth
    draft = kept(bytewise.make, layers=1)
    drafting = {**options, "speculate": drafters, "draft_model": str(draft)}
    assert answers(drafting) == answers({**options, "speculate": "off"})
    with LLM(**drafting) as llm:
        llm.generate("zzzzz", SamplingParams(max_tokens=30, ignore_eos=True, logit_bias={65: 1}))
        assert llm.stats.draft_tokens > 10


def test_a_draft_model_in_a_worker_of_its_own(
    options: dict[str, Any], tiny: Path, free_rows: None
) -> None:
    """Its drafts are counted, and those of the target itself are all accepted."""
    told = {"speculate": "draft", "draft_model": str(tiny), "executor": "multiproc"}
    short = ["abc", "x = x", "zzzz", "river"]  # Read together with the first draft.
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(**{**options, "speculate": "off"}) as llm:
        plain = llm.generate(short, greedy)
    with LLM(**{**options, **told}) as llm:
        found = llm.generate(short, greedy)
        assert llm.stats.accepted_tokens == llm.stats.draft_tokens > 100
    assert [one.outputs for one in found] == [one.outputs for one in plain]


@pytest.mark.parametrize(("depth", "executor"), [(2, "inline"), (1, "multiproc")])
def test_a_head_changes_no_answer(
    options: dict[str, Any], tiny: Path, kept: Kept, depth: int, executor: str, free_rows: None
) -> None:
    head = kept(eagle.make, tiny)
    options |= {"depth": depth, "executor": executor}
    drafting = {**options, "speculate": "draft", "draft_model": str(head)}
    assert answers(drafting) == answers({**options, "speculate": "off"})
    with LLM(**drafting) as llm:
        llm.generate("zzzzz", SamplingParams(max_tokens=40, seed=2, ignore_eos=True))
        assert llm.stats.draft_tokens > 0


def test_a_head_is_refused_by_name(tiny: Path, kept: Kept) -> None:
    files, head = open_model(str(tiny)), str(kept(eagle.make, tiny))
    for wishes, why in (
        (
            {"draft_model": head, "dtype": "bfloat16", "kernels": "ref"},
            "a head, which needs dtype float32",
        ),
        ({"draft_model": "mtp"}, "layers of a llama model that predict further tokens"),
    ):
        with pytest.raises(HeadraceError, match=why) as caught:
            resolve(EngineOptions(**wishes), files, Hardware(CPU, ()))
        assert caught.value.param == "draft_model"
    resolved = resolve(EngineOptions(draft_model=head), files, Hardware(CPU, ()))
    assert resolved.draft is not None
    assert resolved.draft.decision.reason.startswith("eagle head, drafts for ")


def test_what_is_expected_comes_in_fewer_steps(options: dict[str, Any], free_rows: None) -> None:
    """Over Python, as over HTTP: the same answer, drafted from the text that was given for it."""
    with LLM(**{**options, "speculate": "off"}) as llm:
        digits = tuple(llm.tokenizer.encode(one)[0] for one in "13579")
        drawn = SamplingParams(seed=4, max_tokens=32, ignore_eos=True, allowed_token_ids=digits)
        (plain,) = llm.generate(PROMPTS[1], drawn)
        text = plain.outputs[0].text
        assert llm.tokenizer.encode(text) == plain.outputs[0].token_ids, "it is said as it is read"
    accepted = []
    for told_text in (None, [text]):
        with LLM(**{**options, "speculate": "auto"}) as llm:
            (told,) = llm.generate(PROMPTS[1], drawn, prediction=told_text)
            assert told.outputs == plain.outputs
            accepted.append(llm.stats.accepted_tokens)
            assert plain.drafted is None
            assert told.drafted is not None
            stats = llm.stats
            totals = told.drafted.totals()
            assert totals == (stats.drafts, stats.draft_tokens, stats.accepted_tokens)
            assert (told.drafted.saved > 0) == (stats.accepted_tokens > 0)
            assert (told.drafted.totals("prediction")[2] > 0) == (told_text is not None)
            with pytest.raises(InvalidRequest, match="2 predictions for 1 prompts"):
                llm.generate(PROMPTS[1], drawn, prediction=["a", "b"])
    assert accepted[0] < accepted[1]


def test_a_draft_model_is_refused_by_name(tiny: Path, kept: Kept, tmp_path: Path) -> None:
    files, machine = open_model(str(tiny)), Hardware(CPU, ())

    def refused(kind: type[Exception], match: str, **wishes: Any) -> None:
        options = EngineOptions(**{"speculate": "draft", "draft_model": str(tiny), **wishes})
        with pytest.raises(kind, match=match) as caught:
            resolve(options, files, machine)
        assert caught.value.param == "draft_model"  # type: ignore[attr-defined]

    refused(OptionError, "must name one", draft_model=None)
    refused(OptionError, "auto or draft, not off", speculate="off")
    refused(OptionError, "auto or draft, not ngram", speculate="ngram")
    refused(ModelNotFound, "no model 'nothing'", draft_model="nothing")
    encoder = kept(encoders.make)
    refused(OptionError, "makes no tokens", draft_model=str(encoder))
    other = bytewise.make(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|mark|>", "<|note|>"))
    refused(
        OptionError, "another vocabulary.*note.*as token 257, not.*mark", draft_model=str(other)
    )
    text = text.replace("<extra", "<<extra")
    (other / "tokenizer.json").write_text(text)
    refused(OptionError, "another vocabulary", draft_model=str(other))
    less = Hardware(replace(CPU, available=2**20), ())
    options = EngineOptions(speculate="draft", draft_model=str(tiny))
    with pytest.raises(DoesNotFit, match="needs 65536 bytes of cache for 256 tokens"):
        resolve(options, files, replace(less, cpu=replace(CPU, available=2**19)))
    assert resolve(options, files, less).draft is not None
    resolved = resolve(options, files, machine)
    assert resolved.draft is not None
    memory = start.plan(resolved, files, weight_bytes=2**18)
    memory.verify()
    slots = group_bytes(resolved.draft.slots, 16)
    assert memory.pool.slots == resolved.draft.slots
    assert memory.kv_bytes == pool_bytes(memory.pool) + slots > pool_bytes(memory.pool)


CPU = CpuFacts("a CPU", frozenset(), cores=8, physical_cores=4, memory=2**34, available=2**33)
GPU = GpuFacts(0, "a GPU", (9, 0), 80 * 2**30, 79 * 2**30)


def decided(resolved: Resolved) -> Decision:
    (decision,) = [one for one in resolved.decisions if one.name == "speculate"]
    return decision


def test_on_where_drafts_can_be_verified(
    tiny: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "torch_build", lambda: ("2.13.0", "13.0"))
    files = open_model(str(tiny))
    resolved = resolve(EngineOptions(), files, Hardware(CPU, ()))
    assert drafts_of(resolved.options) == DRAFTS
    assert all(name in decided(resolved).reason for name in DEFAULT)
    off = resolve(EngineOptions(speculate="off"), files, Hardware(CPU, ()))
    assert drafts_of(off.options) == 0
    encoder = open_model(str(kept(encoders.make)))
    for model, gpus, obstacle in ((files, (GPU,), "cuda"), (encoder, (), "encoder")):
        resolved = resolve(EngineOptions(), model, Hardware(CPU, gpus))
        assert drafts_of(resolved.options) == 0
        assert decided(resolved).value == "off"
        assert obstacle in decided(resolved).reason


def test_who_is_named_is_refused_with_the_reason(
    tiny: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "torch_build", lambda: ("2.13.0", "13.0"))
    options = EngineOptions(speculate="suffix")
    for named in (options, EngineOptions(draft_model=str(tiny))):
        with pytest.raises(OptionError, match="cuda") as caught:
            resolve(named, open_model(str(tiny)), Hardware(CPU, (GPU,)))
        assert caught.value.param == "speculate"
    encoder = open_model(str(kept(encoders.make)))
    with pytest.raises(OptionError, match="encoder") as caught:
        resolve(options, encoder, Hardware(CPU, ()))
    assert caught.value.param == "speculate"
