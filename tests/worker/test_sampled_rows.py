"""Behind the KV of the last layer only the rows that sample are computed: with the same bits."""

from __future__ import annotations

import itertools
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.outputs import Output
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, StepPlan
from headrace.kernels.arrays import host, tensor
from headrace.kernels.cpu.program import CpuProgram
from headrace.kernels.program import LOGITS, Hidden, want
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions
from oracle import lora, sampled_rows
from oracle.driving import Driver, pool_of
from tiny import families
from tiny.kept import Kept

FAMILIES = (
    *("qwen2", "qwen3", "gemma3-capped", "gemma4", "gemma4-mixture", "granite", "granitemoe"),
    *("llama4", "mistral-window", "qwen3_moe"),
)


def worker_of(path: Path, kernels: str, **options: int) -> Worker:
    values = {"threads": 1, "rows": 8, "step_tokens": 300, "max_context": 256, **options}
    return Worker(open_model(str(path)), WorkerOptions(kernels=kernels, dtype="float32", **values))


@pytest.mark.parametrize("kernels", ["ref", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_for_the_rows_that_sample(kept: Kept, family: str, kernels: str) -> None:
    worker = worker_of(kept(families.make, family), kernels)
    sampled_rows.check(worker)
    program = worker.text.program
    assert isinstance(program, CpuProgram) == (kernels == "cpu")
    assert program.lowered == (kernels == "cpu")


def test_nothing_is_paid_where_every_row_samples(kept: Kept) -> None:
    """No operator that selects does anything, and the backend's program has one record for it."""
    worker = worker_of(kept(families.make, "qwen2"), "cpu")
    sampled_rows.allocate(worker)
    program = worker.text.program
    assert isinstance(program, CpuProgram)
    names = [name.split()[0] for name in program.names]
    assert names.count("select") == 1
    with torch.inference_mode():
        (batch,) = sampled_rows.batches(worker, [([5, 9], [1, 1], [True, True])])
        x = np.ones((2, 4), np.float32)
        assert worker.text.operators.select(x, batch.sample_rows) is x
        program.step(batch, want(hidden="every"))
    assert not program._others, "the hidden states of the rows that sample are all of them"


@pytest.mark.parametrize("kernels", ["ref", "cpu"])
def test_adapters_of_the_rows_that_sample(kept: Kept, tmp_path: Path, kernels: str) -> None:
    path = kept(families.make, "qwen2")
    worker = worker_of(path, kernels, adapters=2)
    for seed, name in enumerate(("one", "two")):
        made = lora.make(path, tmp_path / name, seed=seed, target_modules="all-linear", r=5)
        worker.load_adapter(name, str(made))
    sampled_rows.allocate(worker)
    adapters, program = worker._adapters, worker.text.program
    assert adapters is not None
    with torch.inference_mode():
        for batch in sampled_rows.batches(worker, sampled_rows.STEPS):
            for row, name in ((0, "one"), (2, "two"), (3, "one")):
                spec = RequestSpec(SamplingParams(), 0, adapter=name)
                assert adapters.admit(Admission(row, row, [], 0, 0, spec))
            bounds = host(batch.query_starts)
            counts = np.diff(bounds)
            slots = worker._rows.adapters(np.arange(len(counts)), counts)
            assert slots is not None

            def run(hidden: Hidden, batch=batch, slots=slots) -> tuple[torch.Tensor, torch.Tensor]:
                one = copy(batch)
                one.adapters = slots
                found = program.step(one, want(logits=True, hidden=hidden))
                return tensor(found.hidden).clone(), tensor(found.logits).clone()

            hidden, logits = run("every")
            few, same = run("sampled")
            assert torch.equal(few, hidden[batch.sample_rows])
            assert torch.equal(same, logits)
            plain = tensor(program.step(batch, LOGITS).logits)
            touched = [bool(x.any()) for x in (plain != logits)]
            owner = np.searchsorted(bounds, host(batch.sample_rows), side="right")
            assert touched == [row - 1 in (0, 2, 3) for row in owner.tolist()]


@pytest.mark.parametrize("kernels", ["ref", "cpu"])
def test_who_asks_for_more_changes_no_answer(kept: Kept, kernels: str) -> None:
    """Chunks, prefix hits and preemptions; prompt log-probabilities make whole steps of them."""
    worker = worker_of(kept(families.make, "qwen2"), kernels)
    names = itertools.count()
    shared = [(5 * i * i + i) % families.VOCAB for i in range(40)]

    def answers(scored: tuple[int, ...]) -> list[tuple[list[int], list[float]]]:
        driver = Driver(worker, blocks=16, step_tokens=24, rows=4)
        asked = [str(next(names)) for _ in range(5)]
        for place, name in enumerate(asked):
            own = [(11 * i + place) % families.VOCAB for i in range(5 * place + 2)]
            driver.add(
                name,
                shared[: 40 * (place % 2)] + own,
                SamplingParams(
                    temperature=0,
                    max_tokens=90,
                    logprobs=1,
                    prompt_logprobs=0 if place in scored else None,
                ),
            )
            driver.step()
        driver.run()
        found = [driver.answers[name, 0] for name in asked]
        assert any(answer.preemptions for answer in found)
        for place in scored:
            assert found[place].prompt_logprobs
        return [(a.tokens, [one.logprob for one in a.logprobs]) for a in found]

    plain = answers(())
    assert answers((0, 1, 2, 3, 4)) == plain
    assert answers((2,)) == plain


@pytest.mark.parametrize("kernels", ["ref", "cpu"])
def test_a_vector_beside_rows_that_sample(kept: Kept, kernels: str) -> None:
    """A pooled row needs every hidden state; its neighbour's token is that of a step alone."""
    worker = worker_of(kept(families.make, "qwen2"), kernels)
    tokens = [[(7 * i + row) % families.VOCAB for i in range(20 + row)] for row in range(2)]
    greedy = SamplingParams(temperature=0)
    specs = [RequestSpec(greedy, 0), RequestSpec(greedy, 0, task="vector")]

    def step(rows: list[int]) -> tuple[dict[int, list[int]], Output | None]:
        worker.allocate(pool_of(worker, 9))
        result = worker.execute(
            StepPlan(
                0,
                rows,
                [0] * len(rows),
                [len(tokens[row]) for row in rows],
                [True] * len(rows),
                [
                    Admission(row, row, tokens[row], len(tokens[row]), 0, specs[row == 1])
                    for row in rows
                ],
                [BlockWrite(row, 0, 0, [1 + 4 * row, 2 + 4 * row]) for row in rows],
            )
        )
        assert result.error is None
        vector = (result.outputs or {}).get(len(rows) - 1)
        return dict(zip(rows, result.tokens, strict=True)), vector

    both, vector = step([0, 1])
    assert both[0] == step([0])[0][0]
    assert vector is not None
    assert vector == step([1])[1]
    assert both[1] == []
