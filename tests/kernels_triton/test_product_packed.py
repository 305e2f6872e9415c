"""Products with packed weights in the interpreter against float64, and their row invariance."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.triton.packed import tile_weight
from headrace.kernels.triton.product_packed import ProductConfig, product_packed
from headrace.kernels.weights import PackedWeight


def random_weight(bits: int, group: int, out: int, width: int, offsets: bool) -> PackedWeight:
    torch.manual_seed(bits * 1000 + group)
    groups = -(-width // group)
    codes = torch.randint(0, 2**bits, (out, width), dtype=torch.uint8)
    scales = torch.rand(out, groups) * 0.02 + 1e-3
    return PackedWeight(
        codes,
        scales,
        torch.randn(out, groups) * 0.1 if offsets else None,
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
        (32, 70, 256, 1, ProductConfig(16, 32, 2)),
        (16, 64, 896, 3, ProductConfig(16, 64, 4)),
        (128, 33, 384, 20, ProductConfig(16, 32, 1)),
        (64, 40, 192, 33, ProductConfig(32, 32, 1)),
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


def test_row_does_not_depend_on_others() -> None:
    weight = tile_weight(random_weight(4, 32, 48, 512, offsets=True))
    x = torch.randn(19, 512)
    config = ProductConfig(16, 16, 2)
    together = product_packed(x, weight, None, config)
    for row in (0, 7, 18):
        assert torch.equal(product_packed(x[row : row + 1], weight, None, config)[0], together[row])
