"""Embedding bags as records: the bits of the interpreter, for every type of rows."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.base.graph import TOKENS, Node, Value, WeightRef
from headrace.base.ranking import Bag, BagsSpec
from headrace.kernels import ranked
from headrace.kernels.cpu import bags as records
from headrace.kernels.cpu import emit
from headrace.kernels.cpu.emit import matrix
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.records import HrStep
from headrace.kernels.prepared import Prepared
from headrace.kernels.ranked import BagRows, RankedRows
from headrace.kernels.weights import DenseWeight, PackedWeight, Weight

ROWS, N = 40, 9
DRAWS = np.random.default_rng(5)


def table(kind: str, width: int) -> Weight:
    numbers = DRAWS.normal(size=(ROWS, width)).astype(np.float32)
    if kind == "int8":
        scales = np.abs(numbers).max(1, keepdims=True) / np.float32(127)
        codes = (np.rint(numbers / scales) + 128).astype(np.uint8)
        return PackedWeight(codes, scales, -128 * scales, 8, width, (ROWS, width))
    if kind == "bfloat16":
        return DenseWeight((numbers.view(np.uint32) >> 16).astype(np.uint16))
    return DenseWeight(numbers.astype(kind))


def bag_rows(counts: list[int], of: list[int] | None, *, weighted: bool) -> BagRows:
    starts = np.cumsum([0, *counts])
    ids = DRAWS.integers(0, ROWS, int(starts[-1]))
    weights = DRAWS.normal(size=len(ids)).astype(np.float32) if weighted else None
    return BagRows(ids, starts, weights, None if of is None else np.array(of, np.int64))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("width", [1, 16, 33, 128, 200])
def test_the_same_bits(ops: CpuOperators, kind: str, width: int) -> None:
    given = RankedRows(
        DRAWS.normal(size=(N, 3)).astype(np.float32),
        (
            bag_rows([1] * N, None, weighted=False),
            bag_rows([0, 7, 1, 0, 30, 2, 5, 0, 3], None, weighted=True),
            bag_rows([12, 0, 4], [0, 0, 0, 1, 1, 2, 2, 2, 2], weighted=False),
        ),
    )
    weights = [table(kind, width) for _ in range(4)]
    spec = BagsSpec((Bag(0), Bag(1), Bag(2, "mean"), Bag(1, "mean")), 3)
    x = DRAWS.normal(size=(N, 5)).astype(np.float32)
    wanted = ranked.bags(x, given, spec, weights, host=True)
    prepared = [records.table(one) for one in weights]
    y = np.full(wanted.shape, np.nan, np.float32)
    step = HrStep(n=N)
    records.fill_ranked(step, given)
    refs = [WeightRef((f"{at}.weight",), (ROWS,), width, "bag") for at in range(4)]
    known = Prepared(dict(zip([ref.key for ref in refs], prepared, strict=True)))
    node = Node("embed", (Value(TOKENS, 5),), (Value(TOKENS, y.shape[1]),), tuple(refs), spec)
    op = records.bags(node, spec, [matrix(x)], known, matrix(y))
    ops.team.run(emit.program([op]), 1, step)
    assert np.array_equal(y, wanted)


def test_a_sum_is_close_to_float64() -> None:
    given = bag_rows([300], [0], weighted=True)
    whole = table("float32", 64)
    assert isinstance(whole, DenseWeight)
    assert given.weights is not None
    found = ranked.bags(
        None, RankedRows(np.zeros((1, 0), np.float32), (given,)), BagsSpec((Bag(0),)), [whole],
        host=True,
    )  # fmt: skip
    wanted = (whole.data[given.ids].astype(float) * given.weights[:, None]).sum(0)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5, atol=1e-5)
