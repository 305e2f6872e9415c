"""Products of few rows, with norm, gate and residual, against float64 in the interpreter."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.fuse import Norm
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.product_fp8 import quantise_rows, quantise_weight
from headrace.kernels.triton.product_skinny import SkinnyConfig, product_skinny
from headrace.kernels.triton.split import make_tickets
from headrace.kernels.weights import DenseWeight

ALONE = SkinnyConfig(outs=16, inner=64, programs=0, rows=4, norm=True)
SPLIT = SkinnyConfig(outs=32, inner=64, programs=12, rows=16, norm=True)
SHAPES = [(1, 64, 64), (3, 100, 300), (4, 33, 896)]
"""(rows, out, in)."""
CPU = torch.device("cpu")


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        actual.double() / scale, expected / scale, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("config", [ALONE, SPLIT])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_product(
    config: SkinnyConfig, shape: tuple[int, int, int], dtype: torch.dtype, normed: bool
) -> None:
    """Norm before, bias and residual behind; with and without parts of the input."""
    rows, out, width = shape
    torch.manual_seed(1)
    x = torch.randn(rows, width).to(dtype)
    weight, gain = torch.randn(out, width).to(dtype), torch.rand(width).to(dtype)
    bias, residual = torch.randn(out).to(dtype), torch.randn(rows, out).to(dtype)
    tickets = make_tickets(CPU)
    norm = Norm(gain, 1e-5, 1.0) if normed else None
    y = product_skinny(x, DenseWeight(weight), bias, config, tickets, norm=norm, residual=residual)
    wide = x.double()
    if normed:
        factor = (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt()
        wide = wide * factor * (gain.double() + 1.0)
    close(y, wide @ weight.double().T + bias.double() + residual.double(), dtype)
    assert y.dtype == dtype
    assert not tickets.any(), "the counters are as they were"


@pytest.mark.parametrize("config", [ALONE, SPLIT])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "inner", "width"), [(1, 48, 64), (4, 70, 200)])
def test_gate(config: SkinnyConfig, activation: str, rows: int, inner: int, width: int) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(rows, width), torch.randn(2 * inner, width) * width**-0.5
    gain = torch.rand(width)
    tickets = make_tickets(CPU)
    y = product_skinny(
        x,
        DenseWeight(weight),
        None,
        config,
        tickets,
        norm=Norm(gain, 1e-6, 0.0),
        activation=activation,
    )
    ref = ReferenceOperators(torch.float32)
    normed = ref.rms_norm(x.double(), gain.double(), 1e-6, 0.0)
    close(y, ref.gated(normed @ weight.double().T, activation), torch.float32)
    assert y.shape == (rows, inner)
    assert not tickets.any()


@pytest.mark.parametrize("config", [ALONE, SPLIT])
@pytest.mark.parametrize(("rows", "out", "width"), [(1, 256, 128), (4, 272, 320)])
def test_codes(config: SkinnyConfig, rows: int, out: int, width: int) -> None:
    torch.manual_seed(3)
    x, bias = torch.randn(rows, width), torch.randn(out)
    weight = quantise_weight(torch.randn(out, width))
    codes, scales = quantise_rows(x, blocked=False)
    y = product_skinny(codes, weight, bias, config, make_tickets(CPU), torch.float32, scales=scales)
    values = codes.double() * scales.double()
    close(y, values @ weight.values().double().T + bias.double(), torch.float32)


@pytest.mark.parametrize("config", [ALONE, SPLIT])
def test_rows_do_not_depend_on_each_other(config: SkinnyConfig) -> None:
    torch.manual_seed(4)
    x, weight = torch.randn(4, 896).to(torch.bfloat16), torch.randn(80, 896).to(torch.bfloat16)
    gain, tickets = torch.rand(896).to(torch.bfloat16), make_tickets(CPU)

    def run(rows: torch.Tensor) -> torch.Tensor:
        return product_skinny(
            rows,
            DenseWeight(weight),
            None,
            config,
            tickets,
            norm=Norm(gain, 1e-6, 0.0),
            activation="silu",
        )

    together = run(x)
    for row in range(4):
        assert torch.equal(run(x[row : row + 1])[0], together[row])


def test_rows_of_a_wider_tensor() -> None:
    """Inputs and residuals that are columns of something."""
    torch.manual_seed(5)
    wide, weight = torch.randn(3, 200), torch.randn(40, 64)
    x, residual = wide[:, 8:72], wide[:, 100:140]
    y = product_skinny(x, DenseWeight(weight), None, ALONE, make_tickets(CPU), residual=residual)
    expected = x.double() @ weight.double().T + residual.double()
    close(y, expected, torch.float32)


def test_who_fuses() -> None:
    """Few rows of dense weights; never where rows are invariant over all numbers of rows."""
    weight = DenseWeight(torch.randn(64, 64))
    ops = TritonOperators(torch.float32)
    assert ops.plan_product(weight, 1) == ops.plan_product(weight, 16) == "around"
    assert ops.plan_product(weight, 17) == "library"
    assert ops.plan_product(quantise_weight(weight.data), 1) == "codes"
    assert TritonOperators(torch.float32, deterministic=True).plan_product(weight, 1) == "library"


def test_norm_apart_for_more_rows_and_for_halves() -> None:
    """A norm runs before the product by the table, or if the gain could leave fp16's range."""
    torch.manual_seed(6)
    weight, gain = torch.randn(48, 64), torch.rand(64)
    for rows, dtype, size in ((9, torch.float32, 1.0), (2, torch.float16, 3e4)):
        x = (torch.randn(rows, 64).clamp(-2, 2) * size).to(dtype)
        ops = TritonOperators(dtype)
        norm = Norm(gain.to(dtype) * 4, 1e-6, 0.0)
        y = ops.linear_around(x, DenseWeight(weight.to(dtype)), None, norm, "", None)
        ref = ReferenceOperators(torch.float32)
        normed = ref.rms_norm(x.double(), gain.to(dtype).double() * 4, 1e-6, 0.0)
        close(y, normed @ weight.to(dtype).double().T, torch.float16)
