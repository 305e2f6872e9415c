"""Drafts change how many steps an answer takes, and not one bit of the answer."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch

from headrace.base.sampling import SamplingParams
from headrace.base.step import StepResult
from headrace.kernels.cuda_graphs import GraphProgram
from headrace.kernels.operators import StepLimits
from headrace.loader.open import open_model
from headrace.speculate import NOTHING, Drafter, NGramDrafter, Proposal, Speculation
from headrace.worker import Worker, WorkerOptions
from headrace.worker.batch import make_batch
from oracle import lora, sampled_rows
from oracle.driving import Answer, Driver
from tiny import families
from tiny.kept import Kept

DRAFTS = 4


class Oracle:
    """Knows how the texts go on, and says it: rightly, wrongly, or rightly for a while."""

    name = "oracle"
    texts: list[list[int]]
    right: int
    """Tokens of a proposal that are right; -1: as chance will have it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._chance = random.Random(1)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def propose(self, most: int) -> Proposal:
        known = len(self._tokens)
        text = next((one for one in self.texts if one[:known] == self._tokens), [])
        coming = text[known : known + most]
        coming += [0] * (most - len(coming))
        right = self._chance.randint(0, most) if self.right < 0 else self.right
        tokens = [*coming[:right], *((one + 1) % families.VOCAB for one in coming[right:])]
        return Proposal(tokens[: self._chance.randint(0, most)], 9, self.name)


def oracle_of(texts: list[list[int]], right: int) -> type[Oracle]:
    return type("Told", (Oracle,), {"texts": texts, "right": right})


@pytest.fixture(
    scope="module",
    params=[
        ("ref", "qwen2"),
        ("cpu", "qwen2"),
        ("ref", "lfm2"),
        ("cpu", "lfm2"),
        ("cpu", "qwen3_5"),
        ("cpu", "granitemoehybrid-dense"),
    ],
    ids="-".join,
)
def workers(request: pytest.FixtureRequest, kept: Kept):
    """Makes workers of one model: with drafters, or without."""
    kernels, family = request.param
    files = open_model(str(kept(families.make, family)))

    def make(*drafters: type[Drafter]) -> Worker:
        options = WorkerOptions(
            kernels=kernels,
            dtype="float32",
            threads=1,
            rows=6,
            step_tokens=40,
            max_context=128,
            drafts=DRAFTS if drafters else 0,
        )
        return Worker(files, options, speculation=Speculation(drafters))

    return make


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "warm": SamplingParams(temperature=0.7, seed=3),
    "hot": SamplingParams(temperature=1.3, seed=4, top_k=40, top_p=0.95, n=3),
    "scores": SamplingParams(temperature=0.7, seed=5, logprobs=3, prompt_logprobs=1),
    "penalties": SamplingParams(
        temperature=0.5, seed=6, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2
    ),
    "bias": SamplingParams(temperature=0, logit_bias={5: 4.0, 7: -4.0}, min_tokens=20),
    "filters": SamplingParams(temperature=1, seed=7, typical_p=0.9, top_n_sigma=2.0, min_p=0.01),
    "listed": SamplingParams(temperature=1, seed=8, allowed_token_ids=tuple(range(30))),
}


def answers(
    worker: Worker, *, blocks: int = 60, depth: Literal[1, 2] = 1, adapter: str | None = None
) -> tuple[dict[tuple[str, int], Answer], Driver]:
    """All samplings, one after the other into a running batch, every second under an adapter."""
    driver = Driver(
        worker, blocks=blocks, step_tokens=40, drafts=worker.options.drafts, depth=depth
    )
    for place, (name, sampling) in enumerate(SAMPLINGS.items()):
        prompt = [(place * i * i + 3 * i + place) % families.VOCAB for i in range(9 + 7 * place)]
        wish = {"adapter": adapter} if place % 2 else {}
        driver.add(name, prompt, replace(sampling, max_tokens=30), stop_ids=(11, 12), **wish)
        driver.step()
    return driver.run(), driver


def same(found: dict[tuple[str, int], Answer], wanted: dict[tuple[str, int], Answer]) -> None:
    for key, answer in wanted.items():
        got = found[key]
        # How often it was preempted, and what it then found, is how it was computed.
        assert replace(got, preemptions=0, cached=0) == replace(answer, preemptions=0, cached=0)


class Rerun:
    """A maker of graphs whose replay runs the function again, on the same buffers."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def memory(self) -> int:
        return 0


@pytest.fixture(scope="module")
def plain(workers) -> dict[tuple[str, int], Answer]:
    return answers(workers())[0]


@pytest.fixture(scope="module")
def texts(plain: dict[tuple[str, int], Answer]) -> list[list[int]]:
    return texts_of(plain)


def texts_of(plain: dict[tuple[str, int], Answer]) -> list[list[int]]:
    found = []
    for place, name in enumerate(SAMPLINGS):
        prompt = [(place * i * i + 3 * i + place) % families.VOCAB for i in range(9 + 7 * place)]
        for (other, _), answer in plain.items():
            if other == name:
                found.append(prompt + answer.tokens)
    return found


@pytest.mark.parametrize("right", [0, 1, DRAFTS, -1])
@pytest.mark.parametrize(("blocks", "depth"), [(60, 1), (14, 2)])
def test_oracles_change_no_answer(
    workers, plain, texts, right: int, blocks: int, depth: Literal[1, 2]
) -> None:
    """Right, wrong, right for one and by chance; 14 blocks make sequences give way."""
    found, driver = answers(workers(oracle_of(texts, right)), blocks=blocks, depth=depth)
    same(found, plain)
    verified = [plan for plan in driver.plans if max(plan.counts[: len(plan.rows)]) > 1]
    assert len(verified) > len(SAMPLINGS), "drafts were verified"
    if blocks == 14:
        assert any(answer.preemptions for answer in found.values())


@pytest.mark.parametrize("right", [-1, DRAFTS])
def test_graphs_verify_drafts(workers, plain, texts, right: int) -> None:
    """Batches as a device gets them: every step that verifies is a graph and ends with its tokens,
    greedy and drawn, and answers are those of no drafts."""
    worker = workers(oracle_of(texts, right))
    if worker.options.kernels != "ref":
        pytest.skip("the CPU's own library has no graphs")
    driver = Driver(worker, blocks=60, step_tokens=40, drafts=DRAFTS)
    if worker.cache.states:
        pytest.skip("graphs have no states: `TritonOperators.compile`")
    steps = worker._steps
    steps.host = None
    steps.batch = partial(
        make_batch, rows=worker._rows, tables=worker._tables, pool=worker._pool, draws=True
    )
    limits = StepLimits(64, 6, 128, DRAFTS)
    with torch.inference_mode():
        steps.program = program = GraphProgram(sampled_rows.plain_of(worker), limits, Rerun())
        program.capture()
    for place, name in enumerate(SAMPLINGS):
        if name in ("greedy", "warm"):
            asked = [(place * i * i + 3 * i + place) % families.VOCAB for i in range(9 + 7 * place)]
            wish = replace(SAMPLINGS[name], max_tokens=30)
            driver.add(name, asked, wish, stop_ids=(11, 12))
            driver.step()
    found = driver.run()
    for key, answer in found.items():
        assert answer.tokens == plain[key].tokens
    assert driver.scheduler.stats().accepted_tokens > 10
    assert program.facts.call_by_call == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_result_says_what_was_verified(workers, texts, depth: Literal[1, 2]) -> None:
    """Entry by entry: whose drafts, how many were compared, and that those accepted were said."""
    worker = workers(oracle_of(texts, 1))
    driver = Driver(worker, step_tokens=40, drafts=DRAFTS, depth=depth)
    sampling = SamplingParams(temperature=0, max_tokens=30)
    for place in range(2):
        prompt = [(place * i * i + 3 * i + place) % families.VOCAB for i in range(9 + 7 * place)]
        driver.add(f"{place}", prompt, sampling, stop_ids=(11, 12))
    tried: Counter[int] = Counter()

    def look(result: StepResult) -> StepResult:
        plan, verified = driver.plans[-1], result.verified or {}
        tried.update(one.tried for one in verified.values())
        for entry, new in enumerate(result.tokens):
            one = verified.get(entry)
            assert one is not None or len(new) <= 1
            if one is not None:
                assert (one.drafter, one.accepted) == ("oracle", len(new) - 1)
                assert one.accepted <= min(one.tried, 1)
                assert one.tried <= plan.counts[entry] - 1
                assert depth == 2 or one.tried == plan.counts[entry] - 1
        return result

    while driver.scheduler.has_work:
        assert driver.step(look)
    assert len(tried) > 2
    stats = driver.scheduler.stats()
    assert (stats.drafts, stats.draft_tokens) == (tried.total(), sum(tried.elements()))


@pytest.fixture(scope="module", params=["ref", "cpu"])
def adapted(request: pytest.FixtureRequest, kept: Kept, tmp_path_factory: pytest.TempPathFactory):
    """Makes workers of a model of full and of windowed layers, with an adapter `a`."""
    model = kept(families.make, "gemma3")
    path = lora.make(model, tmp_path_factory.mktemp("adapters") / "a", seed=1)
    files = open_model(str(model))

    def make(*drafters: type[Drafter]) -> Worker:
        options = WorkerOptions(
            kernels=request.param,
            dtype="float32",
            threads=1,
            rows=6,
            step_tokens=40,
            max_context=128,
            drafts=DRAFTS if drafters else 0,
            adapters=1,
        )
        worker = Worker(files, options, speculation=Speculation(drafters))
        worker.load_adapter("a", str(path))
        return worker

    return make


@pytest.fixture(scope="module")
def adapted_plain(adapted) -> dict[tuple[str, int], Answer]:
    return answers(adapted(), adapter="a")[0]


@pytest.mark.parametrize(
    ("right", "blocks", "depth"), [(0, 60, 1), (1, 60, 2), (DRAFTS, 14, 2), (-1, 14, 1)]
)
def test_windows_and_adapters_change_no_answer(
    adapted, adapted_plain, right: int, blocks: int, depth: Literal[1, 2]
) -> None:
    """Drafts beyond a window, of rows with an adapter and without, in one batch."""
    assert not any(answer.error for answer in adapted_plain.values())
    worker = adapted(oracle_of(texts_of(adapted_plain), right))
    found, driver = answers(worker, blocks=blocks, depth=depth, adapter="a")
    same(found, adapted_plain)
    stats = driver.scheduler.stats()
    assert stats.draft_tokens > 40
    assert (stats.accepted_tokens > 0) == (right != 0)
    if blocks == 14:
        assert any(answer.preemptions for answer in found.values())


def test_right_drafts_save_steps(workers, plain, texts) -> None:
    _, driver = answers(workers())
    _, drafting = answers(workers(oracle_of(texts, DRAFTS)))
    assert len(drafting.plans) < 0.6 * len(driver.plans)


def test_lookup_changes_no_answer(workers, plain) -> None:
    same(answers(workers(NGramDrafter))[0], plain)


def test_a_draft_never_goes_on_behind_an_end(workers) -> None:
    class Ending(Oracle):
        def propose(self, most: int) -> Proposal:
            return Proposal([11, 5, 5, 5][:most], 1, self.name)

    worker = workers(Ending)
    driver = Driver(worker, drafts=DRAFTS)
    driver.add("a", [1, 2, 3], SamplingParams(temperature=0, max_tokens=9), stop_ids=(11,))
    driver.run()
    assert all(max(plan.counts) == 1 for plan in driver.plans[1:])


def test_who_has_no_drafts_decodes(workers) -> None:
    class Silent(Oracle):
        def propose(self, most: int) -> Proposal:
            return NOTHING

    worker, sampling = workers(Silent), SamplingParams(temperature=0, max_tokens=9)
    driver = Driver(worker, drafts=DRAFTS)
    answer = driver.ask([1, 2, 3], sampling)
    assert [plan.counts for plan in driver.plans] == [[3], *[[1]] * 8]
    assert answer == Driver(workers()).ask([1, 2, 3], sampling)


@pytest.mark.parametrize("workers", [("cpu", "qwen2")], ids="-".join, indirect=True)
def test_draws_behind_drafts_have_the_targets_odds(workers) -> None:
    """Temperature 1 and six tokens, drafted by chance: how often each is drawn behind a text,
    against its odds as the model gives them for that text as a prompt (chi-squared)."""
    allowed, prompt = tuple(range(20, 26)), [5, 17, 400, 31]
    chance = random.Random(3)

    class Guess:
        name = "guess"

        def extend(self, tokens: Sequence[int]) -> None:
            pass

        def propose(self, most: int) -> Proposal:
            return Proposal([chance.choice(allowed) for _ in range(most)], 9, self.name)

    driver = Driver(workers(Guess), drafts=DRAFTS)
    for seed in range(600):
        hot = SamplingParams(temperature=1, seed=seed, max_tokens=3, allowed_token_ids=allowed)
        driver.add(f"{seed}", prompt, hot)
    drawn: dict[tuple[int, ...], Counter[int]] = {}
    for answer in driver.run().values():
        for place in (1, 2):
            behind = tuple(answer.tokens[:place])
            drawn.setdefault(behind, Counter())[answer.tokens[place]] += 1
    assert driver.scheduler.stats().accepted_tokens > 30, "of six by chance every sixth is right"
    distance, degrees = 0.0, 0
    scores = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for behind, counts in drawn.items():
        if counts.total() < 50:
            continue
        odds = [
            math.exp(driver.ask([*prompt, *behind, one], scores).prompt_logprobs[-1].logprob)
            for one in allowed
        ]
        for one, each in zip(allowed, odds, strict=True):
            expected = counts.total() * each / sum(odds)
            distance += (counts[one] - expected) ** 2 / expected
        degrees += len(allowed) - 1
    assert degrees >= 20
    assert distance < degrees + 4 * math.sqrt(2 * degrees)
