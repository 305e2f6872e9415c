"""Every family against transformers: logits, and 64 greedy tokens, however the work is cut.

fp32 on both sides from the same bf16 weights. Logits agree to a few units of rounding; greedy
tokens are compared exactly, and the distance of best and second logit is asserted to be far above
that rounding, so that equality is no accident and a difference no bad luck.
"""

from __future__ import annotations

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
    program, seen = worker._program, []
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


def check_greedy(oracle: Oracle, tokens: list[int], answer: Answer) -> None:
    assert answer.error is None
    assert answer.finish == "length"
    assert len(answer.tokens) == GREEDY
    expected = oracle.greedy(tokens, GREEDY)
    gaps = oracle.gaps(tokens, expected)
    # Behind a near tie both are right and go their own ways.
    near = gaps < (RECURRENT if "linear_attention" in _kinds(oracle) else NEAR_TIE)
    safe = int(near.nonzero()[0]) if near.any() else GREEDY
    assert safe > GREEDY // 2, "the prompt decides nothing: choose another"
    assert answer.tokens[:safe] == expected[:safe]


def _kinds(oracle: Oracle) -> list[str]:
    return getattr(oracle.model.config, "layer_types", None) or []


def test_greedy_alone(pair) -> None:
    worker, oracle = pair
    driver = Driver(worker)
    for length in LENGTHS:
        check_greedy(oracle, prompt(length), driver.ask(prompt(length)))


@pytest.mark.slow
def test_greedy_long(pair) -> None:
    worker, oracle = pair
    check_greedy(oracle, prompt(LONG), Driver(worker).ask(prompt(LONG)))


def test_greedy_mixed(pair) -> None:
    """Chunked prefill next to decodes, shared prefixes, and so few blocks that some must yield."""
    worker, oracle = pair
    alone = Driver(worker)
    shared = prompt(96, seed=5)
    prompts = [prompt(length) for length in LENGTHS] + [
        shared + prompt(length, seed=6) for length in (3, 40, 150)
    ]
    singles = [alone.ask(tokens).tokens for tokens in prompts]
    # Windows let go of blocks: to run short of them takes a smaller pool.
    blocks = 44 if None in (worker.arch.windows or (None,)) else 18
    driver = Driver(worker, blocks=blocks, step_tokens=48)
    for index, tokens in enumerate(prompts):
        driver.add(str(index), tokens)
    answers = driver.run()
    assert sum(answer.preemptions for answer in answers.values()) > 0
    assert any(answer.cached for answer in answers.values())
    assert any(max(p.counts) > 1 and min(p.counts) == 1 for p in driver.plans)
    for index, tokens in enumerate(prompts):
        check_greedy(oracle, tokens, answers[str(index), 0])
        assert answers[str(index), 0].tokens == singles[index], "not the same as alone"
