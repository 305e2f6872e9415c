"""Drafts change no bit of an answer that is held to a grammar, a reasoning budget or both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from headrace.base.sampling import SamplingParams
from headrace.base.spec import ReasoningBudget
from headrace.base.step import DraftCosts
from headrace.engine.loop.grammar import tokenizer_for_grammars
from headrace.loader.open import open_model
from headrace.speculate import DEFAULT, Drafter, Proposal, Speculation
from headrace.text.grammar import after_reasoning, from_regex, from_schema
from headrace.text.reasoning import THINK as MARKS
from headrace.worker import Worker, WorkerOptions
from headrace.worker.draft_slots import DraftPart
from oracle.driving import Answer, Driver
from tiny import bytewise, eagle
from tiny.bytewise import THINK, UNTHINK
from tiny.kept import Kept

DRAFTS = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "river": {"enum": ["Rhine", "Rhone"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 9},
    },
    "required": ["river", "depth", "note"],
    "additionalProperties": False,
}
JSON = from_schema(SCHEMA, "schema")
LINES = from_regex("([a-f]{2,5}[0-9];){2,4}", "regex")
THOUGHTS = after_reasoning(
    JSON, MARKS, opened=True, special={"<think>": THINK, "</think>": UNTHINK}
)
OPEN = ReasoningBudget(6, THINK, UNTHINK, inside=True)
LATER = ReasoningBudget(2, THINK, UNTHINK, inside=False)
WISHES: dict[str, dict[str, Any]] = {
    "json": {"grammar": JSON},
    "lines": {"grammar": LINES},
    "thoughts": {"grammar": THOUGHTS, "reasoning": OPEN},
    "budget": {"reasoning": OPEN},
    "later": {"reasoning": LATER},
    "free": {},
}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=60),
    "hot": SamplingParams(temperature=1.2, seed=3, max_tokens=60, n=2, logprobs=2),
    "scored": SamplingParams(
        temperature=0.8, seed=5, max_tokens=60, frequency_penalty=0.4, logit_bias={THINK: 6.0}
    ),
}


def prompt_of(place: int) -> list[int]:
    return [97 + (place * i * i + i) % 26 for i in range(5 + 3 * place)]


class Told:
    """Knows how the texts go on; every third time the second token of what it says is wrong."""

    name = "told"
    texts: list[list[int]]

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._asked = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def propose(self, most: int) -> Proposal:
        known = len(self._tokens)
        self._asked += 1
        text = next((one for one in self.texts if one[:known] == self._tokens), [])
        coming = text[known : known + most]
        if self._asked % 3 == 0 and len(coming) > 1:
            coming[1] = (coming[1] + 1) % bytewise.VOCAB
        return Proposal(coming, 9, self.name)


@pytest.fixture(scope="module", params=["ref", "cpu"])
def workers(request: pytest.FixtureRequest, kept: Kept):
    """Makes workers of one model: with drafters by their names or made by the test, or without."""
    folder = kept(bytewise.make)
    files = open_model(str(folder))
    tokenizer = tokenizer_for_grammars(files)

    def make(
        names: Sequence[str] = (),
        *,
        makers: list[Callable[[], Drafter]] | None = None,
        model: Path | None = None,
    ):
        options = WorkerOptions(
            kernels=request.param,
            dtype="float32",
            threads=1,
            rows=6,
            step_tokens=40,
            max_context=192,
            drafts=DRAFTS if names or makers or model else 0,
            draft_model=str(model) if model else None,
        )
        speculation = Speculation(makers, names=names)
        worker = Worker(files, options, grammar_tokenizer=tokenizer, speculation=speculation)
        for grammar in (JSON, LINES, THOUGHTS):
            while not worker.prepare_grammar(grammar):
                time.sleep(0.01)
        return worker

    return make


def answers(
    worker: Worker, *, blocks: int = 80, depth: Literal[1, 2] = 1
) -> tuple[dict[tuple[str, int], Answer], Driver]:
    driver = Driver(
        worker, blocks=blocks, step_tokens=40, drafts=worker.options.drafts, depth=depth
    )
    for place, (name, wish) in enumerate(WISHES.items()):
        for kind, sampling in SAMPLINGS.items():
            driver.add(f"{name} {kind}", prompt_of(place), sampling, (bytewise.END,), **wish)
            driver.step()
    return driver.run(), driver


@pytest.fixture(scope="module")
def plain(workers) -> dict[tuple[str, int], Answer]:
    return answers(workers())[0]


def same(found: dict[tuple[str, int], Answer], wanted: dict[tuple[str, int], Answer]) -> None:
    assert found.keys() == wanted.keys()
    for key, answer in wanted.items():
        assert replace(found[key], preemptions=0, cached=0) == replace(
            answer, preemptions=0, cached=0
        ), (key, found[key].error)


def test_no_budget_cuts_a_character(plain) -> None:
    """A grammar lets no mark stand amid a character, so the budget waits for its last byte."""
    assert not any(answer.error for answer in plain.values())
    for (name, _), answer in plain.items():
        if name.startswith("thoughts") and answer.finish == "stop":
            thoughts = answer.tokens[: answer.tokens.index(UNTHINK)]
            assert OPEN.tokens <= len(thoughts) <= OPEN.tokens + 3
            bytes(token for token in thoughts if token < 256).decode()


def told(plain: dict[tuple[str, int], Answer]) -> type[Told]:
    texts = [
        prompt_of(list(WISHES).index(name.split()[0])) + answer.tokens
        for (name, _), answer in plain.items()
    ]
    return type("ToldAll", (Told,), {"texts": texts})


@pytest.mark.parametrize(("blocks", "depth"), [(80, 1), (26, 2)])
def test_one_who_knows_changes_no_answer(workers, plain, blocks: int, depth: Literal[1, 2]) -> None:
    found, driver = answers(workers(makers=[told(plain)]), blocks=blocks, depth=depth)
    same(found, plain)
    assert sum(max(plan.counts, default=0) > 1 for plan in driver.plans) > len(WISHES)
    if blocks == 26:
        assert any(answer.preemptions for answer in found.values())


@pytest.mark.parametrize("names", [DEFAULT, ("forced",), ("ngram",)], ids=" ".join)
def test_the_houses_own_change_no_answer(workers, plain, names: Sequence[str]) -> None:
    same(answers(workers(names))[0], plain)


@pytest.mark.parametrize("names", [(), DEFAULT], ids=["alone", "beside"])
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_draft_model_changes_no_answer(
    workers,
    plain,
    names: Sequence[str],
    kind: str,
    kept: Kept,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It knows nothing of the grammar, which cuts what it says."""
    target = kept(bytewise.make)
    draft = target if kind == "model" else kept(eagle.make, target)
    given = property(lambda part: DraftCosts(0.0, 0.0), lambda part, told: None)
    monkeypatch.setattr(DraftPart, "costs", given, raising=False)
    found, driver = answers(workers(names, model=draft))
    same(found, plain)
    assert sum(plan.drafts for plan in driver.plans) > 100


class Counted:
    """A program that notes how many rows of the head each step took."""

    def __init__(self, program: Any) -> None:
        self._program, self.heads = program, list[int]()

    def step(self, batch: Any, wanted: Any) -> Any:
        self.heads.append(len(batch.sample_rows))
        return self._program.step(batch, wanted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


@pytest.mark.parametrize("scored", [False, True])
def test_forced_tokens_are_never_refused(workers, scored: bool) -> None:
    """Keys and frames of JSON come several a step, and take no row of the head but where somebody
    wants to know how likely they were."""
    worker = workers(("forced",))
    driver = Driver(worker, drafts=DRAFTS)
    program = worker._steps.program = Counted(worker._steps.program)
    sampling = replace(SAMPLINGS["greedy"], logprobs=1 if scored else None)
    driver.add("a", prompt_of(1), sampling, (bytewise.END,), grammar=JSON)
    results: list[list[int]] = []

    def keep(result: Any) -> Any:
        results.append(result.tokens[0])
        return result

    while driver.scheduler.has_work:
        assert driver.step(keep)
    tried = [plan.counts[0] for plan in driver.plans[1:]]
    assert max(tried) == 1 + DRAFTS
    assert [len(tokens) for tokens in results[1:]] == tried
    assert program.heads[1:] == (tried if scored else [1] * len(tried))
    assert not driver.answers["a", 0].error


def test_an_expected_answer_comes_in_fewer_steps(workers) -> None:
    """Right up to its middle, then with a token too many."""
    sampling = SamplingParams(temperature=0.9, seed=2, max_tokens=50, ignore_eos=True)
    plain = Driver(workers()).ask(prompt_of(3), sampling)
    expected = (*plain.tokens[:25], 7, *plain.tokens[25:])
    driver = Driver(workers(("prediction",)), drafts=DRAFTS)
    driver.add("a", prompt_of(3), sampling, expected=expected)
    assert driver.run()["a", 0].tokens == plain.tokens
    assert len(driver.plans) < 25


def test_what_one_tenant_said_helps_no_other(workers) -> None:
    """The steps of an answer are the same whatever another tenant was told; its own are fewer."""
    sampling = SamplingParams(temperature=1.3, seed=9, max_tokens=60, ignore_eos=True)

    def counts(before: str, prompt: list[int]) -> list[list[int]]:
        driver = Driver(workers(("suffix",)), drafts=DRAFTS)
        driver.add("first", prompt, sampling, salt=before)
        driver.run()
        driver.plans.clear()
        driver.add("second", prompt_of(4), sampling, salt="a")
        driver.run()
        return [plan.counts for plan in driver.plans]

    other = counts("b", prompt_of(4))
    assert other == counts("b", prompt_of(1))
    assert len(counts("a", prompt_of(4))) < 0.6 * len(other)


@pytest.mark.parametrize("names", [(), DEFAULT], ids=["plain", "drafting"])
def test_a_form_that_is_complete_goes_on_with_ends(workers, names: Sequence[str]) -> None:
    """A request without ids that end it gets nothing but those behind its form, and no error."""
    driver = Driver(workers(names), drafts=DRAFTS if names else 0)
    sampling = SamplingParams(temperature=0, max_tokens=60)
    driver.add("a", prompt_of(2), sampling, grammar=LINES)
    answer = driver.run()["a", 0]
    assert answer.error is None
    end = answer.tokens.index(bytewise.END)
    assert bytes(answer.tokens[:end]).decode().endswith(";")
    assert set(answer.tokens[end:]) == {bytewise.END}
