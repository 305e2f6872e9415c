"""A step's arrays as the header that the records read."""

from __future__ import annotations

import ctypes

from ..arrays import Array, address, contiguous, dtype_name, stride
from ..operators import StepBatch
from .bags import fill_pictured, fill_ranked
from .records import HrStep


def fill_step(step: HrStep, batch: StepBatch) -> HrStep:
    """Point `step` to the arrays of `batch`, which must outlive its use."""
    groups = batch.groups
    assert len(groups) <= len(step.groups)
    step.n = batch.tokens.shape[0]
    step.b = batch.lengths.shape[0]
    step.r = batch.sample_rows.shape[0]
    step.group_count = len(groups)
    step.tokens = _at(batch.tokens, "int64")
    step.positions = _at(batch.positions, "int64")
    step.reach = step.positions if batch.reach is None else _at(batch.reach, "int64")
    step.query_starts = _at(batch.query_starts, "int32")
    step.lengths = _at(batch.lengths, "int32")
    step.sample_rows = _at(batch.sample_rows, "int64")
    step.adapters = None if batch.adapters is None else _at(batch.adapters, "int32")
    step.states = None if batch.states is None else _at(batch.states, "int32")
    if batch.types is not None:
        step.types = _at(batch.types, "int64")
    step.turns = None if batch.turns is None else _at(batch.turns, "int64")
    step.windows = None
    if batch.windows is not None:
        step.windows, step.window_count = _at(batch.windows, "int32"), len(batch.windows) - 1
    step.across = None
    if batch.across is not None:
        step.seen = fill_step(HrStep(), batch.across)
        step.across = ctypes.addressof(step.seen)
    if batch.ranked is not None:
        fill_ranked(step, batch.ranked)
    if batch.pictured is not None:
        fill_pictured(step, batch.pictured)
    for slot, group in zip(step.groups, groups, strict=False):
        tables = group.tables
        assert dtype_name(tables) == "int32"
        assert tables.shape[1] <= 1 or stride(tables, 1) == 1
        slot.tables = address(tables)
        slot.table_stride = stride(tables, 0)
        slot.window = group.window or 0
        slot.slots = _at(group.slots, "int64")
    return step


def _at(x: Array, dtype: str) -> int:
    assert dtype_name(x) == dtype
    assert contiguous(x)
    return address(x)
