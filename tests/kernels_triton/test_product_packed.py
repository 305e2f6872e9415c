"""Products with packed weights in the interpreter against float64, and their row invariance."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.packed import merge_tiled, tile_weight
from headrace.kernels.triton.product_packed import ProductConfig, expand, product_packed
from headrace.kernels.weights import DenseWeight, PackedWeight, StackedWeight


def random_weight(bits: int, group: int, out: int, width: int, offsets: bool) -> PackedWeight:
    """Scales and offsets are halves, which tiling keeps exactly."""
    torch.manual_seed(bits * 1000 + group)
    groups = -(-width // group)
    codes = torch.randint(0, 2**bits, (out, width), dtype=torch.uint8)
    scales = (torch.rand(out, groups) * 0.02 + 1e-3).half().float()
    return PackedWeight(
        codes,
        scales,
        (torch.randn(out, groups) * 0.1).half().float() if offsets else None,
        bits,
        group,
        (out, width),
    )


def exact(weight: PackedWeight) -> torch.Tensor:
    index = torch.arange(weight.shape[1]) // weight.group
    values = weight.codes.double() * weight.scales.double()[:, index]
    return values if weight.offsets is None else values + weight.offsets.double()[:, index]


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize(
    ("group", "out", "width", "rows", "config"),
    [
        (32, 70, 256, 1, ProductConfig(16, 32, 6)),
        (16, 64, 896, 3, ProductConfig(16, 64, 3)),
        (128, 33, 384, 20, ProductConfig(16, 32)),
        (64, 40, 192, 33, ProductConfig(32, 32, library=True)),
    ],
)
def test_equals_float64(
    bits: int, group: int, out: int, width: int, rows: int, config: ProductConfig
) -> None:
    weight = random_weight(bits, group, out, width, offsets=bits != 8)
    x = torch.randn(rows, width)
    bias = torch.randn(out)
    y = product_packed(x, tile_weight(weight), bias, config)
    expected = x.double() @ exact(weight).T + bias.double()
    torch.testing.assert_close(y.double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 32), (5, 32), (6, 16), (8, 32), (8, 16)])
@pytest.mark.parametrize("zero", [False, True], ids=["offsets", "zero"])
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
def test_many_rows_see_the_expanded_weight(
    bits: int, group: int, zero: bool, dtype: torch.dtype, whole: bool
) -> None:
    """Bit for bit: rows of the identity read the weights as the products have them. They are two
    roundings from exact ones."""
    packed = random_weight(bits, group, 20, 256, offsets=True)
    if zero:
        packed.offsets = packed.scales * -(2.0 ** (bits - 1))
    weight = tile_weight(packed)
    dense = expand(weight, 0, 20, dtype)
    config = ProductConfig(32, 32, whole=whole)
    y = product_packed(torch.eye(256)[::9].to(dtype), weight, None, config)
    assert torch.equal(y, dense.T[::9])
    digits = 8 if dtype == torch.bfloat16 else 11
    index = torch.arange(256) // group
    assert packed.offsets is not None
    room = (packed.codes * packed.scales[:, index]).abs() + packed.offsets.abs()[:, index]
    error = (dense.double() - exact(packed)).abs()
    assert (error <= 2.01 * 2.0**-digits * room).all()


def test_row_does_not_depend_on_others() -> None:
    weight = tile_weight(random_weight(4, 32, 48, 512, offsets=True))
    x = torch.randn(19, 512)
    config = ProductConfig(16, 16, 6)
    together = product_packed(x, weight, None, config)
    for row in (0, 7, 18):
        assert torch.equal(product_packed(x[row : row + 1], weight, None, config)[0], together[row])


@pytest.mark.parametrize(("bits", "group", "width"), [(4, 32, 192), (6, 16, 400), (8, 64, 64)])
def test_whole_chunks_give_the_sums_of_their_parts(bits: int, group: int, width: int) -> None:
    """Widths that end within a chunk; a row alone has the bits that it has among others."""
    weight = tile_weight(random_weight(bits, group, 40, width, offsets=bits != 8))
    x = torch.randn(19, width).half()
    parts, whole = (ProductConfig(16, 16, 6, whole=each) for each in (False, True))
    found = product_packed(x, weight, None, whole, torch.float32)
    expected = product_packed(x, weight, None, parts, torch.float32)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(product_packed(x[18:], weight, None, whole, torch.float32)[0], found[18])


def test_weights_packed_alike_become_one() -> None:
    parts = [random_weight(4, 32, out, 256, offsets=True) for out in (48, 16)]
    tiled = [tile_weight(part) for part in parts]
    merged = merge_tiled(tiled)
    assert merged is not None
    assert merged.shape == (64, 256)
    x = torch.randn(3, 256)
    config = ProductConfig(16, 16)
    apart = [product_packed(x, part, None, config) for part in tiled]
    assert torch.equal(product_packed(x, merged, None, config), torch.cat(apart, 1))
    assert merge_tiled([tiled[0], tile_weight(random_weight(6, 32, 8, 256, True))]) is None
    assert merge_tiled([tiled[0], DenseWeight(torch.zeros(8, 256))]) is None


def test_parts_of_mixed_formats_fill_one_result() -> None:
    ops = TritonOperators(torch.float32)
    parts = [random_weight(4, 32, 48, 256, True), random_weight(6, 16, 16, 256, True)]
    dense = DenseWeight(torch.randn(8, 256))
    weight = ops.prepare(StackedWeight((*parts, dense)), "linear", None)  # type: ignore[arg-type]
    assert isinstance(weight, StackedWeight)
    x, bias = torch.randn(3, 256), torch.randn(72)
    matrix = torch.cat([*(exact(part) for part in parts), dense.data.double()])
    expected = x.double() @ matrix.T + bias.double()
    torch.testing.assert_close(ops.linear(x, weight, bias).double(), expected, atol=3e-4, rtol=3e-4)


def test_packed_tables_are_expanded() -> None:
    ops = TritonOperators(torch.float32)
    packed = random_weight(4, 32, 48, 256, True)
    made = ops.prepare(packed, "embed", None)  # type: ignore[arg-type]
    assert isinstance(made, DenseWeight)
    torch.testing.assert_close(made.data.double(), exact(packed), atol=1e-6, rtol=1e-6)
