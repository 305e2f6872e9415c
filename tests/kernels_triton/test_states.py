"""Kernels of states in the interpreter against the reference: prompts cut anyhow, drafts that were
accepted in part, checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from headrace.base.step import MOST_DRAFTS
from headrace.kernels.operators import GroupBatch, StateLayer, StepBatch
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.state_lines import StateLines
from headrace.kernels.triton.operators import TritonOperators

from .test_attention import make_batch

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
BLOCKS = 9
STEPS = (
    # (start, count) of every entry; settled, certain, and two checkpoints (at, block) of each.
    ([(0, 13), (0, 2)], [(0, 13, 5, 7, 13, 8), (0, 2, 0, 0, 0, 0)]),
    ([(13, 1), (2, 4)], [(13, 1, 0, 0, 0, 0), (2, 1, 0, 0, 0, 0)]),
    ([(14, 1), (5, 1)], [(14, 1, 15, 6, 0, 0), (3, 1, 0, 0, 0, 0)]),
    ([(15, 20), (6, 1)], None),
)
"""A prompt and a short one, with checkpoints; drafts of the second; two of three accepted."""


def step_of(number: int) -> StepBatch:
    entries, states = STEPS[number]
    batch = make_batch(entries, 16, None)
    tables = torch.tensor([[3, 0], [2, 0]], dtype=torch.int32)
    batch.groups = [GroupBatch(tables, batch.groups[0].slots, None)]
    batch.states = None if states is None else np.array(states, np.int32)
    return batch


def layers(of: DeltaSpec | SsmSpec | None, channels: int, taps: int) -> list[StateLayer]:
    """Two alike, with what nobody wrote in them."""
    inputs = torch.randn(BLOCKS, taps - 1 + MOST_DRAFTS, channels)
    if of is None:
        return [StateLayer(inputs.clone()) for _ in range(2)]
    heads, sizes = of.value_heads, (of.key_size, of.value_size)
    state = torch.randn(BLOCKS, heads, *sizes)
    tail = torch.randn(BLOCKS, MOST_DRAFTS, heads, sum(sizes) + 2)
    return [StateLayer(inputs.clone(), state.clone(), tail.clone()) for _ in range(2)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_conv(gated: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    channels, spec = 72, ConvSpec(0, 4, None if gated else "silu", gated)
    taps, bias = torch.randn(4 * channels), torch.randn(channels)
    mine, theirs = layers(None, channels, 4)
    close = CLOSE if dtype == torch.float32 else {"atol": 3e-2, "rtol": 2e-2}
    for number in range(len(STEPS)):
        batch = step_of(number)
        x = torch.randn(len(batch.tokens), 3 * channels + 5).to(dtype)
        x = x[:, : 3 * channels if gated else channels]
        given = (x, spec, taps, None if gated else bias)
        found = TritonOperators(dtype).short_conv(*given, mine, batch, 0)
        expected = ReferenceOperators(dtype).short_conv(*given, theirs, step_of(number), 0)
        torch.testing.assert_close(found, expected, **close)
        torch.testing.assert_close(mine.inputs, theirs.inputs, **CLOSE)


SPECS = {
    "delta": DeltaSpec(0, 2, 6, 16, 24, 1e-6),
    "delta, tiled": DeltaSpec(0, 2, 4, 12, 40, 1e-6, tiled=True),
    "ssm": SsmSpec(0, 2, 6, 16, 24, 1e-5, norm_groups=2),
    "ssm, whole norm": SsmSpec(0, 1, 3, 32, 8, 1e-5),
}


def given_of(spec: DeltaSpec | SsmSpec, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    widths = [spec.mixed, spec.values, *[spec.value_heads] * spec.gates]
    both = torch.randn(tokens, sum(widths)).to(dtype)
    return list(both.split(widths, 1))


def weights_of(spec: DeltaSpec | SsmSpec) -> list[torch.Tensor]:
    decay, bias, skip = torch.randn(3, spec.value_heads)
    if isinstance(spec, DeltaSpec):
        return [decay, bias, torch.rand(spec.value_size)]
    return [decay, bias, skip, torch.rand(spec.values)]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_recur(name: str, deterministic: bool) -> None:
    torch.manual_seed(5)
    spec = SPECS[name]
    weights, (mine, theirs) = weights_of(spec), layers(spec, 8, 4)
    ops = TritonOperators(torch.float32, deterministic=deterministic)
    for number in range(len(STEPS)):
        batch = step_of(number)
        given = given_of(spec, len(batch.tokens), torch.float32)
        found = ops.recur(given, spec, weights, mine, batch, 0)
        ref = ReferenceOperators(torch.float32)
        expected = ref.recur(given, spec, weights, theirs, step_of(number), 0)
        torch.testing.assert_close(found, expected, **CLOSE)
        torch.testing.assert_close(mine.state, theirs.state, **CLOSE)
        # Nobody reads the step of a state space's drafts.
        last = None if isinstance(spec, DeltaSpec) else -1
        torch.testing.assert_close(mine.tail[..., :last], theirs.tail[..., :last], **CLOSE)


@pytest.mark.parametrize("name", ["delta", "ssm"])
def test_a_prompt_may_be_cut_anywhere(name: str) -> None:
    """The bits of a token do not say how many came with it, nor whose."""
    torch.manual_seed(6)
    spec = SPECS[name]
    weights, given = weights_of(spec), given_of(spec, 40, torch.bfloat16)
    ops = TritonOperators(torch.bfloat16, deterministic=True)
    results = []
    for cuts in ((40,), (1, 7, 31, 1)):
        layer, at, found = replace(layers(spec, 8, 4)[0]), 0, []
        layer.state.zero_()
        for count in cuts:
            batch = make_batch([(at, count)], 16, None)
            tables = torch.tensor([[3]], dtype=torch.int32)
            batch.groups = [GroupBatch(tables, batch.groups[0].slots, None)]
            part = [x[at : at + count] for x in given]
            found.append(ops.recur(part, spec, weights, layer, batch, 0))
            at += count
        results.append((torch.cat(found), layer.state[3].clone()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_padding_walks_nowhere() -> None:
    """Entries that only fill a graph's bucket leave states alone, and give what is finite."""
    torch.manual_seed(7)
    spec = SPECS["delta"]
    weights, (layer, before) = weights_of(spec), layers(spec, 8, 4)
    batch = step_of(3)
    batch.groups[0].tables[1] = 0
    lines = StateLines(2, torch.device("cpu"))
    whole, batch.lengths = batch.lengths, batch.lengths[:1]
    for part, source in lines.copies(replace(batch, query_starts=batch.query_starts[:2]), 2):
        part.copy_(source)
    batch.lengths, batch.state_rows = whole, lines.view(2)
    ops = TritonOperators(torch.float32)
    found = ops.recur(given_of(spec, 21, torch.float32), spec, weights, layer, batch, 0)
    assert torch.isfinite(found).all()
    assert not found[20].any()
    assert found[:20].all()
    assert torch.equal(layer.state[0], before.state[0])
    assert not torch.equal(layer.state[3], before.state[3])
