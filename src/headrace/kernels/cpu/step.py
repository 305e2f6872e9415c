"""A step's tensors as the header that the records read."""

from __future__ import annotations

import torch

from ..operators import StepBatch
from .records import MAX_GROUPS, HrStep


def fill_step(step: HrStep, batch: StepBatch) -> HrStep:
    """Point `step` to the tensors of `batch`, which must outlive its use."""
    groups = batch.groups
    assert len(groups) <= MAX_GROUPS
    step.n = batch.tokens.shape[0]
    step.b = batch.lengths.shape[0]
    step.r = batch.sample_rows.shape[0]
    step.group_count = len(groups)
    step.tokens = _at(batch.tokens, torch.int64)
    step.positions = _at(batch.positions, torch.int64)
    step.query_starts = _at(batch.query_starts, torch.int32)
    step.lengths = _at(batch.lengths, torch.int32)
    step.sample_rows = _at(batch.sample_rows, torch.int64)
    step.adapters = None if batch.adapters is None else _at(batch.adapters, torch.int32)
    for slot, group in zip(step.groups, groups, strict=False):
        tables = group.tables
        assert tables.dtype == torch.int32
        assert tables.shape[1] <= 1 or tables.stride(1) == 1
        slot.tables = tables.data_ptr()
        slot.table_stride = tables.stride(0)
        slot.window = group.window or 0
        slot.slots = _at(group.slots, torch.int64)
    return step


def _at(x: torch.Tensor, dtype: torch.dtype) -> int:
    assert x.dtype == dtype
    assert x.is_contiguous()
    return x.data_ptr()
