"""A product whose input is split over programs: right, and the same bits where it is not split."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.triton import split
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.product_dense import DenseConfig, product_dense
from headrace.kernels.triton.product_fp8 import Fp8Config, product_fp8, quantise_weight
from headrace.kernels.triton.split import add_parts, count_splits
from headrace.kernels.weights import DenseWeight, Fp8Weight


def test_splits_follow_from_the_shape() -> None:
    assert count_splits(384, 4096, 64, 32) == 6
    assert count_splits(384, 28_672, 64, 32) == 1
    assert count_splits(384, 64, 64, 32) == 16  # Two steps of the inner loop at least.
    assert count_splits(384, 64, 64, 1) == 1
    assert count_splits(0, 64, 64, 32) == 1


def test_parts_are_added_in_order() -> None:
    torch.manual_seed(0)
    partial, bias = torch.randn(3, 5, 70), torch.randn(70)
    y = torch.zeros(5, 100)
    add_parts(partial, bias, y[:, :70])
    expected = torch.zeros(5, 70)
    for part in partial:
        expected += part
    assert torch.equal(y[:, :70], expected + bias)
    assert not y[:, 70:].any()


@pytest.mark.parametrize("width", [512, 900])
def test_dense(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(20, width), torch.randn(48, width), torch.randn(48)
    config = DenseConfig(16, 32, 64, programs=8)
    apart = product_dense(x, weight, bias, config)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(apart.double(), exact, atol=2e-4, rtol=2e-4)
    monkeypatch.setattr("headrace.kernels.triton.product_dense.FEW_ROWS", 0)
    assert torch.equal(product_dense(x, weight, bias, config), apart)


@pytest.mark.parametrize("blocked", [False, True])
def test_fp8(blocked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    x, bias = torch.randn(3, 900), torch.randn(150)
    weight = quantise_weight(torch.randn(150, 900))
    if blocked:
        weight = Fp8Weight(weight.data, torch.rand(2, 8) * 0.01 + 0.001)
    whole = product_fp8(x, weight, bias, Fp8Config(16, 64))
    config = Fp8Config(16, 64, programs=9)
    apart = product_fp8(x, weight, bias, config)
    torch.testing.assert_close(apart, whole, atol=1e-3, rtol=1e-4)
    monkeypatch.setattr("headrace.kernels.triton.product_fp8.FEW_ROWS", 0)
    assert torch.equal(product_fp8(x, weight, bias, config), apart)


def test_rows_are_the_same_bits_on_both_sides_of_the_border() -> None:
    torch.manual_seed(3)
    ops = TritonOperators(torch.float32, deterministic=True)
    x = torch.randn(split.FEW_ROWS + 2, 512)
    for weight in (DenseWeight(torch.randn(64, 512)), quantise_weight(torch.randn(64, 512))):
        many = ops.linear(x, weight, None)
        few = ops.linear(x[3:9], weight, None)
        assert torch.equal(few, many[3:9])
