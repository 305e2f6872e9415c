"""Embedding bags as records: see csrc/bags.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

from ...base.graph import Node
from ...base.ranking import BagsSpec
from ..arrays import Array, address, contiguous, stride
from ..prepared import Prepared
from ..ranked import PicturedRows, RankedRows, keeps_codes
from ..weights import DenseWeight, LateWeight, PackedWeight, Weight
from .emit import NOWHERE, Emitted, Matrix, filled, record
from .fusion import rows_of
from .panels import in_order, kind_of
from .records import HEADER, KINDS, HrStep
from .sources import table as table_of

I8 = HEADER.enums["HrKind"]["HR_I8"]
_TABLE, _BAG = HEADER.struct("HrTable"), HEADER.struct("HrBag")


def table(weight: Weight) -> Weight:
    """Prepare a table: rows of fp32, fp16 and bf16, and of 8-bit codes with a scale each, stay as
    in the file; others become fp32."""
    stored = weight.read() if isinstance(weight, LateWeight) else weight
    if isinstance(stored, PackedWeight) and keeps_codes(stored):
        return replace(stored, codes=in_order(stored.codes), scales=in_order(stored.scales))
    return table_of(stored)


def bags(node: Node, spec: BagsSpec, x: Sequence[Matrix], weights: Prepared, y: Matrix) -> Emitted:
    """Emit the node's inputs, numbers and bags side by side. `x`: their places."""
    tables = [weights.weight(ref) for ref in node.weights]
    size = sum(value.width for value in node.reads)
    array = (_TABLE * len(tables))()
    first = size + spec.numbers
    for at, (bag, weight) in enumerate(zip(spec.bags, tables, strict=True)):
        array[at] = filled(_TABLE, *_rows(weight), first, bag.feature, bag.pool == "mean")
        first += weight.shape[1]
    return record("BAGS", *(x or [NOWHERE]), y, array, len(tables), size, spec.numbers)


def given(node: Node, y: Matrix) -> Emitted:
    """Emit the input numbers of a step for all tokens, or for its sampled rows."""
    (out,) = node.out
    return record("BAGS", NOWHERE, y, None, 0, 0, out.width, rows_of(out))


def _rows(weight: Weight) -> tuple[Array, Array | None, int, int, int]:
    """Return the first fields of `HrTable`."""
    size = weight.shape[1]
    if isinstance(weight, PackedWeight):
        return weight.codes, weight.scales, size, I8, size
    assert isinstance(weight, DenseWeight), "the table was not prepared"
    row = stride(weight.data, 0) * weight.data.itemsize
    return weight.data, None, row, KINDS[kind_of(weight)], size


def fill_pictured(step: HrStep, pictured: PicturedRows) -> None:
    """Point a step to the numbers of its pictures."""
    arrays = pictured.patches, pictured.times, pictured.labels, pictured.texts, pictured.text_starts
    assert all(map(contiguous, arrays))
    step.numbers, step.times, step.labels, step.texts, step.text_starts = map(address, arrays)
    step.t = len(pictured.texts)
    step.pictured = arrays


def fill_ranked(step: HrStep, ranked: RankedRows) -> None:
    """Point a step to the features of its rows."""
    assert contiguous(ranked.numbers)
    step.numbers = address(ranked.numbers)
    array = (_BAG * len(ranked.bags))()
    for at, one in enumerate(ranked.bags):
        array[at] = filled(_BAG, one.ids, one.starts, one.weights, one.of)
    step.bags = ctypes.addressof(array)
    step.ranked = ranked, array
