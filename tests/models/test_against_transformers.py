"""Every family against transformers: logits, and 64 greedy tokens, however the work is cut.

fp32 on both sides from the same bf16 weights. Logits agree to a few units of rounding; greedy
tokens are compared exactly, all of them, after prompts that decide: the distance of best and second
logit is far above that rounding, so that equality is no accident and a difference no bad luck.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from headrace.base.sampling import SamplingParams
from headrace.kernels.program import want
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions
from oracle.asks import prompt
from oracle.driving import Answer, Driver
from oracle.reference import Oracle
from tiny import families
from tiny.kept import Kept

LENGTHS = (1, 17, 512)
LONG = 2000
GREEDY = 64
NEAR_TIE = 3e-5
"""A distance of the two best logits that rounding may turn around."""
LOGITS = 3e-5
"""Largest distance of a logit, as a part of the largest."""
SLOW = pytest.mark.slow
RECURRENT = 2e-4
"""Both, where rounding goes on from token to token in a state."""


def worker_of(path, **options) -> Worker:
    defaults = {"kernels": "ref", "threads": 1, "rows": 40, "step_tokens": 512}
    settings = {**defaults, "max_context": families.CONTEXT, **options}
    return Worker(open_model(str(path)), WorkerOptions(**settings))


QUICK = {"qwen2", "gemma3-capped", "llama-scaled", "mistral-window", "qwen3_moe"}
"""One of each kind of layer for `make check`; the others with all tests."""


@pytest.fixture(
    scope="module",
    params=[
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in families.MODELS
    ],
)
def pair(request, kept: Kept):
    path = kept(families.make, request.param)
    return worker_of(path), Oracle(path)


def logits_of(worker: Worker, tokens: list[int]) -> torch.Tensor:
    """Logits of every position, through prefill in chunks: the program's own, taken on their way
    out."""
    driver = Driver(worker, step_tokens=300)
    program, seen = worker.text.program, []
    inner = program.step

    def step(batch, asked):
        found = inner(batch, want(asked.tokens, logits=asked.logits, hidden="every"))
        seen.append(program.head(found.hidden))
        return found

    program.step = step
    answer = driver.ask(tokens, SamplingParams(temperature=0, max_tokens=1))
    assert answer.error is None, answer.error
    return torch.cat(seen)


def test_logits(pair) -> None:
    worker, oracle = pair
    for length in LENGTHS:
        tokens = prompt(length)
        theirs = oracle.logits(tokens)
        ours = logits_of(worker, tokens)
        assert ours.shape == theirs.shape
        scale = theirs.abs().max()
        most = LOGITS if worker.arch.recurrence is None else RECURRENT
        assert (ours - theirs).abs().max() < most * scale, f"{length} tokens"


@pytest.mark.parametrize(
    ("name", "window"), [("gemma3", families.CONTEXT), pytest.param("olmo3", 5000, marks=SLOW)]
)
def test_windows_wider_than_the_context_keep_their_rope(name: str, window: int, kept: Kept) -> None:
    path = kept(families.make, name, sliding_window=window)
    tokens = prompt(LENGTHS[1])
    ours, theirs = logits_of(worker_of(path), tokens), Oracle(path).logits(tokens)
    assert (ours - theirs).abs().max() < LOGITS * theirs.abs().max()


def check_greedy(expected: list[int], answer: Answer) -> None:
    assert answer.error is None
    assert answer.finish == "length"
    assert answer.tokens == expected


def decided(pair, length: int, before: Sequence[int] = ()) -> tuple[list[int], list[int]]:
    """A prompt of a length, perhaps behind other tokens, and what comes after it."""
    worker, oracle = pair
    tie = NEAR_TIE if worker.arch.recurrence is None else RECURRENT
    return oracle.decided(lambda seed: [*before, *prompt(length, seed=seed)], GREEDY, tie)


def test_greedy_alone(pair) -> None:
    driver = Driver(pair[0])
    for length in LENGTHS:
        tokens, expected = decided(pair, length)
        check_greedy(expected, driver.ask(tokens))


@pytest.mark.slow
def test_greedy_long(pair) -> None:
    tokens, expected = decided(pair, LONG)
    check_greedy(expected, Driver(pair[0]).ask(tokens))


def test_greedy_mixed(pair) -> None:
    """Chunked prefill next to decodes, shared prefixes, and so few blocks that some must yield."""
    worker, _ = pair
    shared = prompt(96, seed=5)
    asked = [decided(pair, length) for length in LENGTHS]
    asked += [decided(pair, length, shared) for length in (3, 40, 150)]
    # Windows let go of blocks: to run short of them takes a smaller pool.
    blocks = 44 if None in (worker.arch.windows or (None,)) else 18
    driver = Driver(worker, blocks=blocks, step_tokens=48)
    for index, (tokens, _) in enumerate(asked):
        driver.add(str(index), tokens)
    answers = driver.run()
    assert sum(answer.preemptions for answer in answers.values()) > 0
    assert any(answer.cached for answer in answers.values())
    assert any(max(p.counts) > 1 and min(p.counts) == 1 for p in driver.plans)
    for index, (_, expected) in enumerate(asked):
        check_greedy(expected, answers[str(index), 0])
