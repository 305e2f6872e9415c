"""A draft model decides how many steps an answer takes, and not one bit of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from headrace.base.config import EngineOptions
from headrace.base.errors import DoesNotFit
from headrace.base.groups import block_bytes
from headrace.base.modelfiles import ModelFiles
from headrace.base.sampling import SamplingParams
from headrace.base.step import DraftCosts, Drafting, SlotWrite, StepPlan, StepResult
from headrace.engine.loop.draft_model import SHARE, plan_draft
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions, draft_model, step
from headrace.worker.draft_model import NEAR, READ, DraftModel
from headrace.worker.draft_slots import enter
from oracle.driving import Answer, Driver, pool_of
from tiny import families
from tiny.kept import Kept

DRAFTS = 4
CONTEXT = 640
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "warm": SamplingParams(temperature=0.7, seed=3),
    "hot": SamplingParams(temperature=1.3, seed=4, top_k=40, top_p=0.95, n=3),
    "scores": SamplingParams(temperature=0.7, seed=5, logprobs=3, prompt_logprobs=1),
    "moved": SamplingParams(temperature=0.5, seed=6, repetition_penalty=1.3, logit_bias={5: 4.0}),
}
PLAIN = ("greedy", "warm", "hot")
"""Samplings without any option that a draft model does not know."""


@pytest.fixture(autouse=True)
def for_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model takes as long to draft as its target takes to verify: here it is given away."""
    if "dear" not in request.node.name:
        given = property(lambda part: DraftCosts(0.0, 0.0), lambda part, told: None)
        monkeypatch.setattr(DraftModel, "costs", given, raising=False)


@pytest.fixture(scope="module")
def target(kept: Kept) -> ModelFiles:
    return open_model(str(kept(families.make, "qwen2")))


@pytest.fixture(scope="module")
def other(kept: Kept) -> ModelFiles:
    return open_model(str(kept(families.make, "llama")))


def make(target: ModelFiles, draft: ModelFiles | None, **wishes: Any) -> Worker:
    options: dict[str, Any] = {
        "kernels": "cpu",
        "dtype": "float32",
        "threads": 1,
        "rows": 7,
        "step_tokens": 400,
        "max_context": CONTEXT,
        **wishes,
    }
    if draft is not None:
        told = {"drafts": DRAFTS, "drafters": "draft", "draft_model": str(draft.path)}
        options = {**told, **options}
    return Worker(target, WorkerOptions(**options))


def prompt(place: int, length: int) -> list[int]:
    return [(place * i * i + 3 * i + place) % families.VOCAB for i in range(length)]


def answers(
    worker: Worker,
    *,
    names: tuple[str, ...] = tuple(SAMPLINGS),
    stops: tuple[int, ...] = (11, 12),
    blocks: int = 300,
    depth: Literal[1, 2] = 1,
    slots: int = 7,
) -> tuple[dict[tuple[str, int], Answer], Driver]:
    """Samplings by name, one after the other into a running batch; one prompt is read in parts."""
    drafts = worker.options.drafts
    driver = Driver(worker, blocks=blocks, step_tokens=400, drafts=drafts, depth=depth, slots=slots)
    for place, name in enumerate(names):
        length = READ + 2 * NEAR if name == "warm" else 9 + 7 * place
        sampling = replace(SAMPLINGS[name], max_tokens=30)
        driver.add(name, prompt(place, length), sampling, stop_ids=stops)
        driver.step()
    return driver.run(), driver


def same(found: dict[tuple[str, int], Answer], wanted: dict[tuple[str, int], Answer]) -> None:
    assert found.keys() == wanted.keys()
    for key, answer in wanted.items():
        got = found[key]
        # How often it was preempted, and what it then found, is how it was computed.
        assert replace(got, preemptions=0, cached=0) == replace(answer, preemptions=0, cached=0)


def tokens(plan: StepPlan, row: int) -> int:
    return plan.counts[plan.rows.index(row)] if row in plan.rows else 0


@pytest.mark.parametrize("kernels", ["ref", "cpu"])
@pytest.mark.parametrize("drafter", ["itself", "another"])
def test_no_answer_changes(target: ModelFiles, other: ModelFiles, kernels: str, drafter: str):
    draft = target if drafter == "itself" else other
    plain, _ = answers(make(target, None, kernels=kernels))
    for slots, blocks, depth in ((7, 300, 1), (2, 300, 2), (7, 30, 2)):
        worker = make(target, draft, kernels=kernels)
        found, driver = answers(worker, blocks=blocks, depth=depth, slots=slots)
        same(found, plain)
        assert sum(plan.drafts for plan in driver.plans) > 20, "drafts were verified"
        if blocks == 30:
            assert any(answer.preemptions for answer in found.values())


def test_the_target_itself_is_always_right(target: ModelFiles) -> None:
    """Greedy and drawn, several choices, behind a prompt that it reads in two parts."""
    _, driver = answers(make(target, target), names=PLAIN, stops=())
    stats = driver.scheduler.stats()
    assert stats.draft_tokens > 60
    assert stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize("family", ["mistral-window", "gemma3", "gemma4", "qwen3_moe"])
def test_models_of_other_kinds_draft(family: str, kept: Kept) -> None:
    """Windows that its text is longer than, norms between, a mixture of experts."""
    files = open_model(str(kept(families.make, family)))
    _, driver = answers(make(files, files), names=PLAIN, stops=())
    stats = driver.scheduler.stats()
    assert stats.accepted_tokens == stats.draft_tokens > 60


def test_another_model_is_sometimes_wrong(target: ModelFiles, other: ModelFiles) -> None:
    _, driver = answers(make(target, other), names=PLAIN, stops=())
    stats = driver.scheduler.stats()
    assert stats.accepted_tokens < stats.draft_tokens


def test_a_row_without_a_slot_gets_none_until_one_is_left(target: ModelFiles) -> None:
    worker = make(target, target)
    driver = Driver(worker, blocks=300, step_tokens=400, drafts=DRAFTS, slots=1)
    driver.add("first", prompt(1, 9), SamplingParams(temperature=0, max_tokens=12))
    driver.add("second", prompt(2, 9), SamplingParams(temperature=0, max_tokens=40))
    driver.run()
    first, second = (
        [place for place, plan in enumerate(driver.plans) if tokens(plan, row) > 1 and place > 1]
        for row in (0, 1)
    )
    assert first
    assert second
    assert max(first) < min(second)


def test_keys_of_refused_drafts_do_not_count(
    target: ModelFiles, other: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the row goes on without the model before it drafts again."""
    monkeypatch.setattr(DraftModel, "room", lambda _, known: DRAFTS if known % 12 < 6 else 0)
    account, checked = DraftModel.account, []

    def verified(model: DraftModel, entries: list[int]) -> Drafting:
        for row, slot in model._held.items():
            checked.append(slot.computed)
            own, text = model._own.host_tokens[slot.number], model._rows.host_tokens[row]
            assert own[: slot.computed].tolist() == text[: slot.computed].tolist()
        return account(model, entries)

    monkeypatch.setattr(DraftModel, "account", verified)
    driver = Driver(make(target, other), blocks=300, drafts=DRAFTS)
    answer = driver.ask(prompt(2, 9), SamplingParams(temperature=0.7, seed=3, max_tokens=60))
    assert answer.error is None
    assert max(checked) > 40


@pytest.mark.parametrize("context", [8, 14])
def test_a_context_shorter_than_what_is_read_at_once(target: ModelFiles, context: int) -> None:
    driver = Driver(make(target, target, max_context=context), blocks=20, drafts=DRAFTS)
    driver.ask(prompt(2, 3), SamplingParams(temperature=0, max_tokens=context - 3))
    assert driver.scheduler.stats().accepted_tokens > 0


def test_slots_of_a_context_shorter_than_a_block(target: ModelFiles) -> None:
    """Room for one context, and less than a block."""
    options = EngineOptions(
        draft_model=str(target.path), block_size=128, max_context=64, kv_dtype="float32"
    )
    plenty = plan_draft(options, target, 2**30).slots
    assert {group.span for group in plenty} == {64}
    each = sum(block_bytes(group, 1) for group in plenty) // 64
    assert plan_draft(options, target, int(100 * each / SHARE) + 1).slots[0].span == 64
    with pytest.raises(DoesNotFit, match="for 64 tokens"):
        plan_draft(options, target, int(63 * each / SHARE) + 1)


def test_a_slot_has_one_row(target: ModelFiles) -> None:
    worker = make(target, target)
    Driver(worker, blocks=20, drafts=DRAFTS)
    model = worker.drafter
    assert model is not None
    for row in (0, 1):  # Where a step was interrupted, a row may not have been released.
        model.take(SlotWrite(row, 0, 0))
    assert model._held.keys() == {1}


def test_an_interrupted_step_leaves_nothing_to_the_next_one(
    target: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, results = make(target, target), list[StepResult]()
    driver = Driver(worker, blocks=60, drafts=DRAFTS)
    verification = worker._steps.verification
    assert verification is not None

    def keep(result: StepResult) -> StepResult:
        results.append(result)
        return result

    def fail(*_: object) -> None:
        assert verification._verified, "drafts were made and verified"
        raise RuntimeError("interrupted")

    greedy = SamplingParams(temperature=0, max_tokens=20)
    driver.add("first", prompt(2, 9), greedy)
    while driver.plans[-1].drafts == 0 if driver.plans else True:
        driver.step(keep)
    driver.step(keep)
    with monkeypatch.context() as changed:
        changed.setattr(verification, "propose", fail)
        driver.step(keep)
    assert results[-1].error is not None
    driver.add("second", prompt(3, 9), greedy)
    driver.step(keep)
    assert results[-1].verified is None
    assert results[-1].drafting is not None
    assert results[-1].drafting.depth == 0
    assert results[-1].drafting.making == 0


def test_a_late_look_at_a_step_adds_no_time_to_it(
    target: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step's plan is made before the last one's result is taken."""
    driver = Driver(make(target, target), blocks=60, drafts=DRAFTS)
    driver.add("one", prompt(2, 9))
    plan = driver.scheduler.schedule()
    assert plan is not None
    now = [step.time.perf_counter()]
    monkeypatch.setattr(step, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    finish = driver.worker.launch(plan)
    now[0] += 1000
    result = finish()
    assert result.error is None
    assert result.seconds < 500


def test_the_next_turn_is_read_once(target: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make(target, target)
    driver = Driver(worker, blocks=300, step_tokens=400, drafts=DRAFTS)
    text = prompt(3, READ)
    first = driver.ask(text, SamplingParams(temperature=0, max_tokens=20))
    model = worker.drafter
    assert model is not None
    read = []
    monkeypatch.setattr(
        draft_model,
        "enter",
        lambda plan, row, start, *rest, **more: (
            read.append(start),
            enter(plan, row, start, *rest, **more),
        ),
    )
    driver.ask([*text, *first.tokens, 7, 8, 9], SamplingParams(temperature=0, max_tokens=20))
    assert min(read) > len(text) + len(first.tokens) - DRAFTS


def test_ids_that_one_of_the_models_lacks(target: ModelFiles, kept: Kept) -> None:
    """The smaller vocabulary drafts for the larger one and the other way round."""
    smaller = open_model(str(kept(families.make, "llama", vocab_size=families.VOCAB - 100)))
    for one, two in ((target, smaller), (smaller, target)):
        prompts = [[one.arch.vocab_size - 1, 4, 5, 6], [3, 4, 5, 6]]
        said = []
        for draft in (None, two):
            driver = Driver(make(one, draft), blocks=300, drafts=DRAFTS if draft else 0)
            hot = SamplingParams(temperature=3.0, seed=9, max_tokens=60)
            said.append([driver.ask(each, hot) for each in prompts])
        assert said[0] == said[1]


def test_it_sleeps_and_wakes_with_the_worker(target: ModelFiles) -> None:
    worker = make(target, target)
    text, greedy = prompt(1, 20), SamplingParams(temperature=0, max_tokens=20)
    first = Driver(worker, blocks=300, drafts=DRAFTS).ask(text, greedy)
    asleep = pool_of(worker, 2)
    none = tuple(group._replace(blocks=0) for group in asleep.slots)
    worker.allocate(replace(asleep, slots=none))
    driver = Driver(worker, blocks=300, drafts=DRAFTS)
    assert driver.ask(text, greedy) == first
    assert driver.scheduler.stats().accepted_tokens > 10


@pytest.mark.parametrize(("tokens", "share"), [(3, 0.02), (300, 0.02), (300, 2.0)])
def test_a_dear_text_is_read_where_the_answer_is_long_enough(
    target: ModelFiles, tokens: int, share: float
) -> None:
    """Reading 300 tokens at a sixteenth of a draft each, for so many tokens of an answer."""
    worker = make(target, target)
    assert worker.drafter is not None
    worker.drafter.costs = DraftCosts(share, share / NEAR)
    driver = Driver(worker, blocks=300, drafts=DRAFTS)
    driver.scheduler._drafts.learn = lambda *_, **__: None  # type: ignore[method-assign]
    driver.ask(prompt(5, 300), SamplingParams(temperature=0, max_tokens=tokens))
    drafted = sum(plan.drafts for plan in driver.plans)
    assert (drafted > 0) == (tokens == 300 and share < 1)
