"""Layer norm, activations, bidirectional attention and dense products against float64, and rows
that have the same bits whatever else is in the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from headrace.kernels.arrays import address
from headrace.kernels.cpu import emit
from headrace.kernels.cpu.emit import NOT_QUANTISED, matrix
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import pack
from headrace.kernels.cpu.records import INDICES, ROWS_N, HrStep
from headrace.kernels.weights import DenseWeight

WIDTHS = (1, 7, 16, 33, 100, 384)
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "relu2": lambda x: functional.relu(x).square(),
    "relu": functional.relu,
}
LENGTHS = (5, 1, 40, 0, 17, 250, 16)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_layer_norms(ops: CpuOperators, width: int, mean: float) -> None:
    x, weight, bias = torch.randn(5, width) + mean, torch.randn(width), torch.randn(width)
    want = functional.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-12)
    got = ops.layer_norm(x, weight, bias, 1e-12)
    if width == 1:  # What is left of one number is nothing, whatever it is divided by.
        assert torch.equal(got, bias.expand(5, 1))
    else:
        atol = 1e-5 if mean == 0 else 2e-4  # What cancels is 30 with its rounding.
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=atol)


def test_a_layer_norm_takes_the_residual_along(ops: CpuOperators) -> None:
    x, residual = torch.randn(4, 100), torch.randn(4, 100)
    weight, bias, y = torch.randn(100), torch.randn(100), torch.empty(4, 100)
    total = x + residual
    op = emit.layer_norm(
        matrix(x), matrix(residual), weight, bias, 1e-12, matrix(y), NOT_QUANTISED, ROWS_N
    )
    ops.team.run(emit.program([op]), 1, HrStep(n=4))
    assert torch.equal(residual, total)
    assert torch.equal(y, ops.layer_norm(total, weight, bias, 1e-12))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_activations(ops: CpuOperators, activation: str, width: int) -> None:
    x = 4 * torch.randn(6, width)
    x[0, : min(width, 6)] = torch.tensor([0.0, 90.0, -90.0, 1e4, -1e4, 1e-20])[:width]
    want = ACTIVATIONS[activation](x.double())
    got = ops.activate(x, activation)
    # erf comes from a formula that is good to 1.5e-7, which gelu multiplies by x.
    atol = 3e-6 if activation == "gelu" else 5e-7
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=atol)
    x[1, 0] = float("nan")
    assert ops.activate(x, activation)[1, 0].isnan()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("out", [1, 16, 50, 96])
def test_an_activation_at_the_end_of_a_product(
    ops: CpuOperators, activation: str, out: int
) -> None:
    x, data, bias = torch.randn(19, 40), torch.randn(out, 40), torch.randn(out)
    weight = pack(DenseWeight(data), ops.team)
    y = torch.empty(19, out)
    op = emit.linear(
        NOT_QUANTISED, matrix(x), weight, bias, matrix(y), ROWS_N, activation=activation
    )
    ops.team.run(emit.program([op]), 1, HrStep(n=19))
    assert torch.equal(y, ops.activate(ops.linear(x, weight, bias), activation))


@pytest.mark.parametrize("index", INDICES)
def test_a_table_is_read_by_any_of_a_steps_numbers(ops: CpuOperators, index: str) -> None:
    data = torch.randn(20, 33)
    chosen = np.array([3, 19, 0, 3])
    y = torch.empty(4, 33)
    op = emit.embed(DenseWeight(data), 1.0, matrix(y), index)
    ops.team.run(emit.program([op]), 1, HrStep(n=4, **{index: address(chosen)}))
    assert torch.equal(y, data[chosen])


def attended(ops: CpuOperators, qkv: torch.Tensor, heads: int, lengths: list[int]) -> torch.Tensor:
    size = qkv.shape[1] // (3 * heads)
    y = torch.empty(len(qkv), heads * size)
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    op = emit.bidirectional(matrix(qkv), heads, size, size**-0.5, matrix(y))
    step = HrStep(n=len(qkv), b=len(lengths), query_starts=address(starts))
    ops.team.run(emit.program([op]), 1, step)
    return y


@pytest.mark.parametrize(("heads", "size"), [(1, 16), (12, 32), (2, 64), (3, 20), (2, 7), (1, 100)])
def test_every_token_sees_its_whole_entry(ops: CpuOperators, heads: int, size: int) -> None:
    qkv = 2 * torch.randn(sum(LENGTHS), 3 * heads * size)
    got = attended(ops, qkv, heads, list(LENGTHS))
    start = 0
    for length in LENGTHS:
        own = qkv[start : start + length]
        q, k, v = own.double().view(length, 3, heads, size).permute(1, 2, 0, 3)
        want = (
            functional.scaled_dot_product_attention(q, k, v)
            .transpose(0, 1)
            .reshape(length, heads * size)
        )
        found = got[start : start + length]
        # A score of up to 20 has a rounding of 1e-6, which the exponential hands on to values of 8.
        torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=3e-5)
        if length:
            assert torch.equal(attended(ops, own.contiguous(), heads, [length]), found), "alone"
        start += length


def test_what_is_no_number_stays_in_its_entry_and_head(ops: CpuOperators) -> None:
    qkv = torch.randn(20, 3 * 2 * 16)
    qkv[3, 32 + 5] = float("nan")  # A key of the first head of the first entry.
    got = attended(ops, qkv, 2, [8, 12])
    assert got[:8, :16].isnan().all()
    assert not got[:8, 16:].isnan().any()
    assert not got[8:].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(384, 384), (50, 37), (16, 1), (40, 200)])
def test_dense_products_of_many_rows(
    ops: CpuOperators, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    out, width = shape
    data = torch.randn(out, width).to(dtype)
    weight, x = pack(DenseWeight(data), ops.team), torch.randn(61, width)
    got = ops.linear(x, weight, None)
    want = x.double() @ data.double().T
    # Each of the sum's roundings is at most 2^-24 of what was summed so far.
    bound = width * 2.0**-24 * (x.double().abs() @ data.double().abs().T)
    assert ((got.double() - want).abs() <= bound).all()
    for rows in (1, 2, 3, 5, 7, 12, 13, 24, 25, 36):
        assert torch.equal(ops.linear(x[:rows], weight, None), got[:rows]), rows
