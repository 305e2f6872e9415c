"""Mixtures of experts: what a row's experts make of it is what their products alone would give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_cases import quantise_rows, random_blocks, same
from transformers.activations import ACT2FN

from headrace.base.graph import RouteSpec
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.timing import timed
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import BlockWeight, DenseWeight, StackedWeight, Weight
from headrace.quant.ggml import dequantise

REFERENCE = ReferenceOperators(torch.float32)
ROUTES = {
    "softmax": RouteSpec(3),
    "raw softmax": RouteSpec(3, normalise=False),
    "sigmoid": RouteSpec(4, scores="sigmoid", scale=2.5),
    "groups": RouteSpec(4, scores="sigmoid", groups=6, active_groups=2),
    "square root": RouteSpec(4, scores="sqrt_softplus", scale=1.5),
    "raw square root": RouteSpec(4, normalise=False, scores="sqrt_softplus"),
    "all": RouteSpec(24),
}


def logits_of(rows: int, experts: int = 24) -> torch.Tensor:
    """Few values, so that many are equal."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-6, 7, (rows, experts), generator=generator) / 4


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTES)
def test_routes_are_the_references(ops: CpuOperators, name: str, biased: bool) -> None:
    """The smaller of equal scores' numbers is chosen; a bias counts in the choice alone."""
    spec, logits = ROUTES[name], logits_of(37)
    bias = torch.randint(-3, 4, (24,), generator=torch.Generator().manual_seed(3)) / 8
    given = bias if biased else None
    if biased and spec.scores == "softmax":
        logits = logits + torch.randn(37, 24, generator=torch.Generator().manual_seed(4))
    expected, theirs = REFERENCE.route(logits, spec, given)
    chosen, shares = ops.route(logits, spec, given)
    assert torch.equal(chosen.view(torch.int32).long(), expected)
    assert (shares - theirs).abs().max() < 1e-6
    if spec.normalise:
        assert (shares.sum(-1) - spec.scale).abs().max() < 1e-5


def test_scores_of_deepseek_v4(ops: CpuOperators) -> None:
    """To the last digits of small ones too, against transformers' function in double precision."""
    logits = torch.linspace(-60, 60, 24 * 50).view(50, 24)
    spec = RouteSpec(24, normalise=False, scores="sqrt_softplus")
    wanted = ACT2FN["sqrtsoftplus"](logits.double())
    for backend in (ops, REFERENCE):
        chosen, shares = backend.route(logits, spec, None)
        at = chosen if chosen.dtype == torch.int64 else chosen.view(torch.int32).long()
        torch.testing.assert_close(shares.double(), wanted.gather(-1, at), rtol=4e-7, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_router_that_overflowed_names_experts(best: CpuOperators, value: float) -> None:
    for spec in ROUTES.values():
        logits = logits_of(4)
        logits[0], logits[1, 2], logits[2, 1:] = value, value, value
        chosen = best.route(logits, spec, None)[0].view(torch.int32)
        assert chosen.min() >= 0
        assert chosen.max() < 24
        assert all(len(set(row)) == spec.active for row in chosen.tolist())
        assert same(best.route(logits[3:], spec, None)[0], chosen[3:].view(torch.float32))


def weight(kind: str, out: int, width: int, seed: int) -> Weight:
    if kind in ("float32", "bfloat16"):
        made = torch.randn(out, width, generator=torch.Generator().manual_seed(seed)) / 8
        return DenseWeight(made.to(getattr(torch, kind)))
    return random_blocks(kind, out, width, seed)


def mixture(
    ops: CpuOperators, kinds: tuple[str, str, str], experts: int, width: int, inner: int
) -> tuple[list[Weight], list[Weight]]:
    def unused(weight: Weight, dtype: torch.dtype) -> DenseWeight:
        raise AssertionError

    gate_up, down = [], []
    for number in range(experts):
        gate, up = (
            weight(kind, inner, width, 10 * number + at) for at, kind in enumerate(kinds[:2])
        )
        both = StackedWeight((gate, up))  # type: ignore[arg-type]
        gate_up.append(ops.prepare(both, "moe", unused))  # type: ignore[arg-type]
        last = weight(kinds[2], width, inner, 10 * number + 2)
        down.append(ops.prepare(last, "moe", unused))  # type: ignore[arg-type]
    return gate_up, down


CASES = {
    "Q4_K": (("Q4_K", "Q4_K", "Q6_K"), 512, 256),
    "Q8_0": (("Q8_0", "Q8_0", "Q8_0"), 96, 64),
    "mixed": (("Q5_0", "bfloat16", "Q4_1"), 64, 32),
    "floats behind codes": (("Q4_0", "Q5_1", "float32"), 96, 40),
    "bf16": (("bfloat16", "bfloat16", "bfloat16"), 40, 24),
    "narrow": (("float32", "float32", "float32"), 24, 20),
}


@pytest.mark.parametrize("case", CASES)
def test_what_each_expert_would_give_alone(ops: CpuOperators, case: str) -> None:
    """In any batch, among any others: products, gate and the sum in ascending order."""
    kinds, width, inner = CASES[case]
    gate_up, down = mixture(ops, kinds, 6, width, inner)
    rows = 230
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    logits = logits_of(rows, 6)
    logits[:200, 4] = 9.0  # More rows than are summed at once.
    logits[:, 2] = -9.0  # Nobody's.
    chosen, shares = ops.route(logits, RouteSpec(2), None)
    y = ops.experts(x, chosen, shares, gate_up, down, "silu")
    for row in (0, 7, 199, 229):
        expected = np.zeros(width, np.float32)
        picked = chosen[row].view(torch.int32).tolist()
        for expert, share in sorted(zip(picked, shares[row].tolist(), strict=True)):
            gated = ops.gated(ops.linear(x[row : row + 1], gate_up[expert], None), "silu")
            part = ops.linear(gated, down[expert], None)[0].numpy()
            expected = (part.astype(np.float64) * share + expected).astype(np.float32)
        near = 1e-6 * float(np.abs(expected).max())
        assert np.abs(y[row].numpy() - expected).max() <= near
    for low, high in ((0, 1), (3, 10), (190, 230)):
        own = chosen[low:high].clone(), shares[low:high].clone()
        part = ops.experts(x[low:high], *own, gate_up, down, "silu")
        assert same(part, y[low:high])


@pytest.mark.parametrize(
    ("kinds", "width", "inner"),
    [
        (("MXFP4",) * 3, 96, 64),
        (("bfloat16",) * 3, 40, 28),
        (("MXFP4", "MXFP4", "float32"), 64, 40),
    ],
)
def test_clamped_experts_with_biases(
    ops: CpuOperators, kinds: tuple[str, str, str], width: int, inner: int
) -> None:
    """The experts of gpt-oss by definition in float64; gates and values beyond their bounds."""
    experts, rows = 5, 70
    gate_up, down = mixture(ops, kinds, experts, width, inner)
    exact = [
        [dense(weight(kind, *shape, 10 * number + at)) for at, (kind, shape) in enumerate(shapes)]
        for shapes in [list(zip(kinds, [(inner, width)] * 2 + [(width, inner)], strict=True))]
        for number in range(experts)
    ]
    random = torch.Generator().manual_seed(3)
    x = 3 * torch.randn(rows, width, generator=random)
    up_bias = 6 * torch.randn(experts * 2 * inner, generator=random)
    down_bias = torch.randn(experts * width, generator=random)
    chosen, shares = ops.route(logits_of(rows, experts), RouteSpec(2), None)
    y = ops.experts(x, chosen, shares, gate_up, down, "clamped", (up_bias, down_bias))
    clamped = 0
    for row in range(rows):
        expected = torch.zeros(width, dtype=torch.float64)
        for expert, share in zip(chosen[row].view(torch.int32).tolist(), shares[row], strict=True):
            gate_w, up_w, down_w = exact[expert]
            bias = up_bias.view(experts, 2, inner)[expert].double()
            seen = x[row : row + 1]
            seen = quantise_rows(seen) if kinds[0] == "MXFP4" else seen.double()
            gate, up = gate_w @ seen[0] + bias[0], up_w @ seen[0] + bias[1]
            clamped += int((gate > 7).sum() + (up.abs() > 7).sum())
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            both = (gate * torch.sigmoid(1.702 * gate) * (up + 1)).float()[None]
            both = quantise_rows(both) if kinds[2] == "MXFP4" else both.double()
            made = down_w @ both[0] + down_bias.view(experts, width)[expert]
            expected += made * share.double()
        # A code of what is between may be rounded the other way.
        near = 3e-2 if kinds[2] == "MXFP4" else 1e-5
        assert (y[row] - expected).abs().max() <= near * expected.abs().max()
    assert clamped > 100
    alone = chosen[9:10].clone(), shares[9:10].clone()
    part = ops.experts(x[9:10], *alone, gate_up, down, "clamped", (up_bias, down_bias))
    assert same(part, y[9:10])


def dense(made: Weight) -> torch.Tensor:
    if isinstance(made, BlockWeight):
        return dequantise(made, torch.float32).double()
    assert isinstance(made, DenseWeight)
    return made.data.double()


def test_threads_are_in_no_bit() -> None:
    kinds, width, inner = CASES["Q4_K"]
    found = []
    for threads in (1, 2, 5):
        ops = CpuOperators(threads)
        weights = mixture(ops, kinds, 6, width, inner)
        x = torch.randn(40, width, generator=torch.Generator().manual_seed(1))
        routed = ops.route(logits_of(40, 6), RouteSpec(2), None)
        found.append(ops.experts(x, *routed, *weights, "gelu_tanh"))
    assert all(same(one, found[0]) for one in found)


def test_their_records_are_timed_by_name(ops: CpuOperators) -> None:
    kinds, width, inner = CASES["Q4_K"]
    weights = mixture(ops, kinds, 6, width, inner)
    with timed() as records:
        routed = ops.route(logits_of(3, 6), RouteSpec(2), None)
        ops.experts(torch.randn(3, width), *routed, *weights, "silu")
    assert [one.name for one in records] == ["route", "quantise", *["experts"] * 3]
