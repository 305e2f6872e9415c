"""Every family on the CPU kernels against transformers: logits, and 64 greedy tokens, in any cut.

fp32 on both sides from the same bf16 weights, keys and values in fp32.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from headrace.base.sampling import SamplingParams
from headrace.kernels.arrays import tensor
from headrace.kernels.program import want
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions
from oracle.asks import prompt
from oracle.driving import Driver
from oracle.reference import Oracle
from tiny import families
from tiny.kept import Kept

pytestmark = pytest.mark.slow
LENGTHS = (1, 7, 40, 133, 600)
LOGITS = 2e-4
"""Largest distance of a logit, as a part of the largest."""
NEAR_TIE = 3e-5
"""A distance of the two best logits that rounding may turn around."""


def worker_of(path: Path, **options) -> Worker:
    settings = {"kernels": "cpu", "kv_dtype": "float32", "threads": 1, "rows": 8, **options}
    settings = {"step_tokens": 1024, "max_context": families.CONTEXT, **settings}
    return Worker(open_model(str(path)), WorkerOptions(**settings))


@pytest.fixture(scope="module", params=families.MODELS)
def pair(request, kept: Kept):
    path = kept(families.make, request.param)
    return worker_of(path), Oracle(path)


def logits_of(worker: Worker, tokens: list[int], step_tokens: int) -> torch.Tensor:
    """Logits of every position, of a prompt that comes in chunks."""
    driver, seen = Driver(worker, step_tokens=step_tokens), []
    program = worker.text.program
    inner = program.step

    def step(batch, asked):
        found = inner(batch, want(asked.tokens, logits=asked.logits, hidden="every"))
        seen.append(tensor(program.head(found.hidden)).clone())
        return found

    program.step = step
    try:
        answer = driver.ask(tokens, SamplingParams(temperature=0, max_tokens=1))
    finally:
        program.step = inner
    assert answer.error is None, answer.error
    return torch.cat(seen)


def test_logits(pair) -> None:
    worker, oracle = pair
    for length in LENGTHS:
        tokens = prompt(length)
        theirs = oracle.logits(tokens)
        ours = logits_of(worker, tokens, 1024)
        assert ours.shape == theirs.shape
        distance = (ours - theirs).abs().max() / theirs.abs().max()
        assert distance <= LOGITS, f"{length} tokens: {distance:.1e}"


def test_chunks_change_no_bit(pair) -> None:
    worker, _ = pair
    whole = logits_of(worker, prompt(133), 1024)
    for chunk in (1, 7, 64):
        assert torch.equal(logits_of(worker, prompt(133), chunk), whole), f"chunks of {chunk}"


def test_greedy_tokens_alone_behind_a_prefix_and_beside_others(pair) -> None:
    worker, oracle = pair
    tie = NEAR_TIE if worker.arch.recurrence is None else LOGITS
    asked = [oracle.decided(partial(prompt, length), 64, tie) for length in LENGTHS]
    alone = Driver(worker, prefix_cache=False)
    for tokens, expected in asked:
        assert alone.ask(tokens, GREEDY).tokens == expected
    driver = Driver(worker, step_tokens=48, rows=8)
    for _ in range(2):
        for index, (tokens, _) in enumerate(asked):
            driver.add(str(index), tokens, GREEDY)
        answers = driver.run()
        for index, (_, expected) in enumerate(asked):
            assert answers.pop((str(index), 0)).tokens == expected, "not the same as alone"


GREEDY = SamplingParams(temperature=0, max_tokens=64)


def test_long_factors_behind_the_original_context(tmp_path: Path) -> None:
    """The choice of factors follows from the served context, not from a prompt's length."""
    folder = families.make(tmp_path / "far", "phi3-long")
    config = json.loads((folder / "config.json").read_text())
    config["original_max_position_embeddings"] = 32
    config["rope_parameters"]["original_max_position_embeddings"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    oracle = Oracle(folder)
    for context, length in ((32, 20), (256, 133)):
        theirs = oracle.logits(prompt(length))
        ours = logits_of(worker_of(folder, max_context=context), prompt(length), 16)
        assert (ours - theirs).abs().max() <= LOGITS * theirs.abs().max(), f"context {context}"
