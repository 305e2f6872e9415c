"""Steps of a worker by hand, to hold what is computed for the sampled rows against the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
import torch

from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, StepPlan
from headrace.kernels.arrays import tensor
from headrace.kernels.operators import StepBatch
from headrace.kernels.program import CallByCall, want
from headrace.worker import Worker
from headrace.worker.arrays import like
from tiny import families

from .driving import pool_of

Step = tuple[list[int], list[int], list[bool]]
"""(starts, counts, samples) of its entries."""
STEPS: list[Step] = [
    ([0, 9, 3, 7], [33, 1, 50, 1], [True, True, False, False]),
    ([0, 9], [40, 30], [False, False]),
    ([5, 9, 3], [1, 1, 1], [True, False, True]),
    ([5, 9, 3], [1, 1, 1], [True, True, True]),
    ([0, 60], [1, 20], [False, True]),
]
BLOCK = 16


def batches(worker: Worker, steps: Sequence[Step]) -> Iterator[StepBatch]:
    """The batch of each step, over a past of random KV, by an allocated worker. Each is valid until
    the next."""
    width = 8
    torch.manual_seed(1)
    for layer in worker.cache.layers:
        tensor(layer.k).normal_()
        tensor(layer.v).normal_()
    for starts, counts, samples in steps:
        admitted = [
            Admission(
                row,
                row,
                [(7 * row + 3 * i * i) % families.VOCAB for i in range(start + count)],
                start + count,
                0,
                RequestSpec(SamplingParams(), 0),
            )
            for row, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
        own = list(range(len(starts)))
        worker._rows.release(own)
        for admission in admitted:
            worker._rows.admit(admission)
        worker._tables.write(
            [
                BlockWrite(row, group, 0, list(range(1 + row * width, 1 + (row + 1) * width)))
                for row in own
                for group in range(len(worker._pool.groups))
            ]
        )
        yield worker._batch(StepPlan(0, own, starts, counts, samples))


def plain_of(worker: Worker) -> CallByCall:
    """The steps of an allocated worker, operator by operator."""
    operators = worker.text.operators
    return CallByCall(worker.text.model, operators, worker.cache, operators.drawing)


def allocate(worker: Worker) -> None:
    worker.allocate(pool_of(worker, 40, BLOCK))


def of_every_token(worker: Worker, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Call by call, with the last layer for every token."""
    hidden, logits = worker.text.model.forward(
        worker.text.operators, batch, worker.cache, every=True
    )
    return tensor(hidden).clone(), tensor(logits).clone()


def check(worker: Worker) -> None:
    """The same bits for the rows that sample, by the model and by the backend's program; the same
    KV behind the step."""
    allocate(worker)
    program, last = worker.text.program, worker.cache.layers[-1]
    with torch.inference_mode():
        for batch in batches(worker, STEPS):
            several = copy(batch)
            several.fixed = False
            # As speculation asks: several rows of a sequence, those at its end.
            wished = np.arange(len(batch.tokens) * 2 // 3, len(batch.tokens))
            several.sample_rows = like(wished, batch.tokens)
            for step in (batch, several):
                hidden, logits = of_every_token(worker, step)
                assert hidden.shape == (len(step.tokens), worker.arch.hidden)
                written = tensor(last.k).clone(), tensor(last.v).clone()
                for every in ("every", "sampled", "every"):
                    wanted = hidden if every == "every" else hidden[step.sample_rows]
                    asked = want(logits=True, hidden=every)
                    for run in (plain_of(worker), program):
                        found = run.step(step, asked)
                        assert torch.equal(tensor(found.hidden), wanted)
                        assert torch.equal(tensor(found.logits), logits)
                        assert torch.equal(tensor(last.k), written[0])
                        assert torch.equal(tensor(last.v), written[1])
                    chosen = program.step(step, want("best", hidden=every))
                    assert torch.equal(tensor(chosen.hidden), wanted)
                    assert torch.equal(tensor(chosen.tokens), logits.argmax(-1))
