"""Products of few rows with packed weights, with gate and residual, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.fuse import Norm
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.packed import merge_tiled, tile_weight
from headrace.kernels.triton.product_packed_skinny import (
    PackedSkinnyConfig,
    product_packed_skinny,
)
from headrace.kernels.triton.split import make_tickets
from headrace.kernels.weights import PackedWeight, StackedWeight, TiledWeight

from .test_product_packed import exact, random_weight

CPU = torch.device("cpu")
WHOLE = PackedSkinnyConfig(outs=32, programs=0)
SPLIT = PackedSkinnyConfig(outs=64, programs=12)
MANY = PackedSkinnyConfig(outs=32, programs=6, rows=16)


def symmetric(bits: int, group: int, out: int, width: int) -> PackedWeight:
    """With the zero in the middle, said by offsets."""
    packed = random_weight(bits, group, out, width, offsets=False)
    packed.offsets = packed.scales * -(2.0 ** (bits - 1))
    return packed


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(
        actual.double() / scale, expected / scale, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("zero", [False, True], ids=["offsets", "zero"])
@pytest.mark.parametrize(
    ("rows", "out", "width", "config"),
    [(1, 64, 256, WHOLE), (3, 70, 384, SPLIT), (11, 33, 304, MANY)],
)
def test_equals_float64(
    bits: int, group: int, zero: bool, rows: int, out: int, width: int, config: PackedSkinnyConfig
) -> None:
    """Bias and residual behind; whole and split inputs, some no multiple of a chunk."""
    width = -(-width // group) * group
    if zero:
        weight = symmetric(bits, group, out, width)
    else:
        weight = random_weight(bits, group, out, width, offsets=True)
    tiled = tile_weight(weight)
    assert tiled.zero == (2 ** (bits - 1) if zero else None)
    x = torch.randn(rows, width).to(torch.bfloat16)
    bias, residual = torch.randn(out), torch.randn(rows, out)
    tickets = make_tickets(CPU)
    y = product_packed_skinny(x, tiled, bias, config, tickets, torch.float32, residual=residual)
    # Weights are not rounded to x's type: sums are right to fp32, and to what cancels in them.
    close(y, x.double() @ exact(weight).T + bias.double() + residual.double(), 2e-5)
    assert y.dtype == torch.float32
    assert not tickets.any(), "the counters are as they were"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_types_of_activations(dtype: torch.dtype, bits: int) -> None:
    weight = symmetric(bits, 32, 48, 256)
    x = torch.randn(2, 256).to(dtype)
    y = product_packed_skinny(x, tile_weight(weight), None, SPLIT, make_tickets(CPU))
    close(y, x.double() @ exact(weight).T, {4: 1e-5, 2: 5e-3}[dtype.itemsize])
    assert y.dtype == dtype


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (5, 32), (6, 16), (8, 32)])
def test_gate(config: PackedSkinnyConfig, activation: str, bits: int, group: int) -> None:
    weight = random_weight(bits, group, 2 * 70, 256, offsets=bits == 4)
    x = torch.randn(3, 256).to(torch.bfloat16) * 0.1
    tickets = make_tickets(CPU)
    y = product_packed_skinny(
        x, tile_weight(weight), None, config, tickets, torch.float32, activation=activation
    )
    both = x.double() @ exact(weight).T
    close(y, ReferenceOperators(torch.float32).gated(both, activation), 2e-5)
    assert y.shape == (3, 70)
    assert not tickets.any()


@pytest.mark.parametrize("config", [WHOLE, SPLIT])
def test_rows_do_not_depend_on_each_other(config: PackedSkinnyConfig) -> None:
    weight, tickets = tile_weight(random_weight(4, 32, 80, 896, offsets=True)), make_tickets(CPU)
    x = torch.randn(5, 896).to(torch.bfloat16)
    together = product_packed_skinny(x, weight, None, config, tickets)
    for row in range(5):
        alone = product_packed_skinny(x[row : row + 1], weight, None, config, tickets)
        assert torch.equal(alone[0], together[row])


def test_columns_of_wider_tensors() -> None:
    weight = symmetric(4, 32, 40, 128)
    wide, into = torch.randn(3, 200).to(torch.bfloat16), torch.zeros(3, 64, dtype=torch.bfloat16)
    x, residual = wide[:, 8:136], wide[:, 150:190]
    product_packed_skinny(
        x, tile_weight(weight), None, WHOLE, make_tickets(CPU), residual=residual, y=into[:, 5:45]
    )
    close(into[:, 5:45], x.double() @ exact(weight).T + residual.double(), 5e-3)
    assert not into[:, :5].any()
    assert not into[:, 45:].any()


def test_numbers_beyond_halves() -> None:
    """Scales of any size: every output's power of two takes them into fp16's range."""
    weight = random_weight(4, 32, 48, 256, offsets=True)
    sizes = 2.0 ** torch.arange(-60, 36, 2).float()
    assert weight.offsets is not None
    weight.scales *= sizes[:, None]
    weight.offsets *= sizes[:, None]
    x = torch.randn(2, 256).to(torch.bfloat16)
    y = product_packed_skinny(x, tile_weight(weight), None, WHOLE, make_tickets(CPU), torch.float32)
    expected = x.double() @ exact(weight).T
    close(y / sizes, expected / sizes, 2e-5)


def test_scales_are_halves() -> None:
    """Tiling rounds each scale and offset to eleven bits; scales of zero stay."""
    torch.manual_seed(3)
    codes = torch.randint(0, 16, (32, 256), dtype=torch.uint8)
    scales, offsets = torch.rand(32, 8) + 1e-3, torch.randn(32, 8)
    scales[3], offsets[3] = 0.0, 0.0
    weight = PackedWeight(codes, scales, offsets, 4, 32, (32, 256))
    y = product_packed_skinny(
        torch.eye(256)[:16], tile_weight(weight), None, MANY, make_tickets(CPU)
    ).T.double()
    error = (y - exact(weight)[:, :16]).abs()
    allowed = codes[:, :16].double() * scales[:, :1].double() + offsets[:, :1].abs().double()
    assert (error <= allowed * 2**-11 + 1e-6).all()
    assert not y[3].any()


def test_zeros_that_kernels_can_take_off() -> None:
    weight = symmetric(4, 32, 32, 128)
    assert weight.offsets is not None
    assert tile_weight(weight).zero == 8
    weight.offsets[5, 1] *= 1.5
    assert tile_weight(weight).zero is None
    bare = random_weight(4, 32, 32, 128, offsets=False)
    assert tile_weight(bare).zero == 0
    eight = symmetric(8, 32, 32, 128)
    assert tile_weight(eight).zero == 128
    # 2048 + 128 + 100 is no number of bf16.
    eight.offsets = eight.scales * -100.0
    assert tile_weight(eight).zero is None
    merged = merge_tiled([tile_weight(weight), tile_weight(weight)])
    assert merged is not None
    assert merge_tiled([tile_weight(weight), tile_weight(bare)]) is None


def test_who_fuses_and_what_it_gives() -> None:
    """Packed weights of up to 16 rows, through the operators: norm before, gate, residual."""
    torch.manual_seed(7)
    ops, ref = TritonOperators(torch.float32), ReferenceOperators(torch.float32)
    packed = random_weight(4, 32, 96, 128, offsets=True)
    weight = ops.prepare(packed, "linear", None)  # type: ignore[arg-type]
    assert isinstance(weight, TiledWeight)
    assert ops.plan_product(weight, 1) == ops.plan_product(weight, 16) == "around"
    assert ops.plan_product(weight, 17) == "library"
    assert TritonOperators(torch.float32, deterministic=True).plan_product(weight, 1) == "library"
    x, gain = torch.randn(4, 128), torch.rand(128)
    normed = ref.rms_norm(x.double(), gain.double(), 1e-6, 0.0)
    y = ops.linear_around(x, weight, None, Norm(gain, 1e-6, 0.0), "silu", None)
    close(y, ref.gated(normed @ exact(packed).T, "silu"), 2e-5)
    residual, bias = torch.randn(4, 96), torch.randn(96)
    y = ops.linear_around(x, weight, bias, None, "", residual)
    close(y, x.double() @ exact(packed).T + bias.double() + residual.double(), 2e-5)


def test_parts_of_several_formats() -> None:
    """q and k of one format become one product, v of another fills its columns."""
    ops = TritonOperators(torch.float32)
    parts = [
        random_weight(4, 32, 48, 256, True),
        random_weight(4, 32, 16, 256, True),
        symmetric(6, 16, 16, 256),
    ]
    weight = ops.prepare(StackedWeight(tuple(parts)), "linear", None)  # type: ignore[arg-type]
    assert isinstance(weight, StackedWeight)
    assert [part.shape[0] for part in weight.parts] == [64, 16]
    x, bias = torch.randn(3, 256), torch.randn(80)
    expected = x.double() @ torch.cat([exact(part) for part in parts]).T + bias.double()
    close(ops.linear(x, weight, bias), expected, 2e-5)
