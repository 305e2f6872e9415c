"""Routing, placing and grouped products in the interpreter against the reference."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.triton.moe import MoeConfig, addresses, moe, place, route
from headrace.kernels.triton.product_dense import DenseConfig, product_dense
from headrace.kernels.weights import DenseWeight, Weight


@pytest.mark.parametrize(("tokens", "experts", "active"), [(1, 4, 2), (37, 6, 3), (5, 40, 8)])
def test_equals_reference(tokens: int, experts: int, active: int) -> None:
    torch.manual_seed(tokens)
    width, intermediate = 48, 40
    x = torch.randn(tokens, width)
    router = torch.randn(tokens, experts)
    gate_up = list(torch.randn(experts, 2 * intermediate, width) * 0.1)
    down = list(torch.randn(experts, width, intermediate) * 0.1)
    for normalise in (False, True):
        wrapped: list[list[Weight]] = [[DenseWeight(w) for w in part] for part in (gate_up, down)]
        expected = ReferenceOperators(torch.float32).moe(
            x, router, *wrapped, active, normalise, "silu"
        )
        actual = moe(
            x, router, addresses(gate_up), addresses(down), intermediate, active, normalise,
            "silu", MoeConfig(16, 32, 32),
        )  # fmt: skip
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_every_assignment_is_placed_once() -> None:
    torch.manual_seed(0)
    experts, rows = 9, 16
    chosen, shares = route(torch.randn(50, experts), 3, True)
    torch.testing.assert_close(shares.sum(1), torch.ones(50))
    listed, tile_expert = place(chosen, experts, rows)
    found = listed[listed >= 0]
    assert sorted(found.tolist()) == list(range(150))
    owner = tile_expert.repeat_interleave(rows)[listed >= 0]
    assert torch.equal(owner, chosen.view(-1)[found.long()])


@pytest.mark.parametrize(("rows", "outs", "width"), [(1, 40, 64), (70, 130, 100), (33, 16, 257)])
def test_dense_product(rows: int, outs: int, width: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, width), torch.randn(outs, width), torch.randn(outs)
    config = DenseConfig(32, 32, 32)
    y = product_dense(x, weight, bias, config)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(product_dense(x[row : row + 1], weight, bias, config)[0], y[row])
