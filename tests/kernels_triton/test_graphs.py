"""The lists of attention in the buffers of graphs: padded steps attend as steps call by call do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.base.graph import AttentionSpec
from headrace.kernels import attention_plan
from headrace.kernels.cuda_graphs import GraphProgram
from headrace.kernels.operators import KvCache, KvLayer, StepBatch, StepLimits
from headrace.kernels.program import want
from headrace.kernels.triton.operators import TritonOperators
from oracle.steps import Forwards, plain

from .test_attention import make_batch

HEADS, KV_HEADS, WIDTH, BLOCK, BLOCKS = 4, 2, 16, 16, 80
STEPS = (
    [(20, 1), (7, 1), (300, 1)],
    [(0, 30), (12, 1)],
    [(33, 1)],
    [(20, 4), (7, 1), (300, 3)],
    [(0, 9), (40, 11)],
    [(5, 2)],
)
"""Decoding, prompts, drafts: (start, count) of each entry."""


class Rerun:
    """A maker whose replay runs the function again."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def memory(self) -> int:
        return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "drafts", "deterministic"), [(None, 0, False), (130, 7, False), (None, 0, True)]
)
def test_padded_steps_attend_alike(
    window: int | None, drafts: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "PROGRAMS", 6)
    torch.manual_seed(2)
    spec = AttentionSpec(0, HEADS, KV_HEADS, WIDTH, 0.25)
    k, v = torch.randn(2, BLOCKS, KV_HEADS, BLOCK, WIDTH)
    cache = KvCache([KvLayer(k, v)], [0], [window])
    queries = torch.randn(400, HEADS * WIDTH)

    def forward(operators: TritonOperators, batch: StepBatch, kv: KvCache, *_: object, **__: bool):
        hidden = operators.attend(queries[batch.positions], spec, kv.layers[0], batch, 0)
        return hidden, hidden[: len(batch.lengths), :8]

    ops = TritonOperators(torch.float32, deterministic=deterministic)
    calls = plain(ops, Forwards(forward), cache)
    program = GraphProgram(calls, StepLimits(32, 4, 400, drafts), Rerun())
    program.capture()
    for entries in STEPS:
        batch = make_batch(entries, BLOCK, window)
        expected = calls.step(batch, want(logits=True, hidden="every"))
        batch.plan = None
        found = program.step(batch, want(logits=True, hidden="every"))
        torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-5, rtol=1e-5)
        assert batch.plan is not None
        chunks = 0 if drafts and max(count for _, count in entries) <= 1 + drafts else None
        assert chunks is None or len(batch.plan.chunks) == chunks, "drafts are no prompts"
    assert program.facts.replayed == len(STEPS)
