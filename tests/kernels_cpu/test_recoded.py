"""Blocks without panels of their own are computed with by the numbers that they hold, exactly."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from cpu_cases import quantise_rows

from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.recoded import RECODED, recoded
from headrace.kernels.weights import BlockWeight
from tiny.blocks import random_blocks


def weight(kind: str, rows: int = 40, columns: int = 512) -> BlockWeight:
    return BlockWeight(kind, random_blocks(kind, rows, columns, seed=3), (rows, columns), "w")


def numbers(block: BlockWeight) -> np.ndarray:
    if block.kind == "F32":
        return np.asarray(block.data).view(np.float32)
    return gguf.quants.dequantize(np.asarray(block.data), gguf.GGMLQuantizationType[block.kind])


@pytest.mark.parametrize("kind", sorted(RECODED))
def test_no_number_changes(kind: str) -> None:
    made, wanted = recoded(weight(kind)), numbers(weight(kind))
    np.testing.assert_array_equal(numbers(made.blocks()), wanted)
    np.testing.assert_array_equal(numbers(made.first(3)), wanted[:3])


@pytest.mark.parametrize("kind", sorted(RECODED))
def test_products_and_rows_of_a_table(ops: CpuOperators, kind: str) -> None:
    def unused(*_: object) -> None:
        raise AssertionError

    source, wanted = weight(kind), torch.from_numpy(numbers(weight(kind)))
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    given = quantise_rows(x) if kind == "Q3_K" else x.double()
    y = ops.linear(x, ops.prepare(source, "linear", unused), None)  # type: ignore[arg-type]
    exact = given @ wanted.double().T
    assert (torch.as_tensor(y) - exact).abs().max() < 1e-5 * exact.abs().max()
    table = ops.prepare(source, "embed", unused)  # type: ignore[arg-type]
    rows = ops.embed(torch.tensor([7, 0, 39]), table, 1.0)
    assert torch.equal(torch.as_tensor(rows), wanted[[7, 0, 39]])


def test_what_it_costs_is_told(best: CpuOperators) -> None:
    ops = CpuOperators(1, team=best.team)
    for kind in sorted(RECODED):
        ops.prepare(weight(kind), "linear", lambda *_: None)  # type: ignore[arg-type, return-value]
    assert [(one.name, one.value) for one in ops.told] == [
        ("matrices in Q2_K", "panels of F32"),
        ("matrices in Q3_K", "panels of Q6_K"),
    ]
    assert "32 bits a weight are read" in ops.told[0].reason
