"""Operators that work row by row against the reference, over odd widths."""

from __future__ import annotations

import pytest
import torch
from cpu_cases import KINDS, random_blocks

from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import pack
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import BlockWeight, DenseWeight
from headrace.quant.ggml import dequantise

REFERENCE = ReferenceOperators(torch.float32)
WIDTHS = (1, 7, 16, 33, 100, 896)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(ops: CpuOperators, width: int, offset: float) -> None:
    x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    want = REFERENCE.rms_norm(x, weight, 1e-6, offset)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6, offset), want, rtol=1e-5, atol=1e-6)
    want, total = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-6, offset)
    got, sums = ops.add_rms_norm(x, residual, weight, 1e-6, offset)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(sums, total)


def test_norm_of_zeros_is_zero(ops: CpuOperators) -> None:
    assert (ops.rms_norm(torch.zeros(2, 32), torch.ones(32), 1e-6, 0.0) == 0).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_add(ops: CpuOperators, width: int) -> None:
    x, residual = torch.randn(3, width), torch.randn(3, width)
    want = x + residual
    assert torch.equal(ops.add(x, residual), want)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("width", WIDTHS)
def test_gated(ops: CpuOperators, activation: str, width: int) -> None:
    x = 4 * torch.randn(6, 2 * width)
    x[0, : min(width, 6)] = torch.tensor([0.0, 90.0, -90.0, 1e4, -1e4, 1e-20])[:width]
    want = REFERENCE.gated(x.double(), activation)
    got = ops.gated(x, activation)
    # erf comes from a formula that is good to 1.5e-7, which gelu multiplies by x.
    atol = 6e-6 if activation == "gelu" else 1e-6
    torch.testing.assert_close(got, want.float(), rtol=2e-6, atol=atol)


def test_gate_spreads_what_is_not_a_number(ops: CpuOperators) -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = float("nan")
    for activation in ("silu", "gelu_tanh", "gelu"):
        assert ops.gated(x, activation)[0, 3].isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_embed_blocks_exactly(best: CpuOperators, kind: str) -> None:
    weight = random_blocks(kind, 50, 512)
    tokens = torch.tensor([3, 49, 0, 3])
    prepared = best.prepare(weight, "embed", no_dequantiser)
    got = best.embed(tokens, prepared, 1.0)
    assert torch.equal(got, dequantise(weight, torch.float32)[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embed_dense(best: CpuOperators, dtype: torch.dtype) -> None:
    data = torch.randn(20, 33).to(dtype)
    data[1, :4] = torch.tensor([1e-7, -1e-7, 0.0, 6e-5])
    tokens = torch.tensor([1, 19])
    assert torch.equal(best.embed(tokens, DenseWeight(data), 2.0), data[tokens].float() * 2)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits(ops: CpuOperators, softcap: float | None) -> None:
    data = torch.randn(300, 64)
    x = 10 * torch.randn(3, 64)
    got = ops.logits(x, pack(DenseWeight(data), ops.team), softcap)
    want = REFERENCE.logits(x, DenseWeight(data), softcap)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def no_dequantiser(weight: BlockWeight, dtype: torch.dtype) -> DenseWeight:
    raise AssertionError("the CPU kernels expand nothing at load")
