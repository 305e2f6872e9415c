"""A plan's columns and the worker's tables → the tensors that a forward pass reads."""

from __future__ import annotations

import numpy as np
import torch

from ..base.step import PoolShape, StepPlan
from ..kernels.operators import GroupBatch, HostStep, StepBatch
from .rows import BlockTables, Rows
from .transfer import to_device


def make_batch(
    plan: StepPlan,
    rows: Rows,
    tables: BlockTables,
    pool: PoolShape,
    *,
    token_types: bool = False,
) -> StepBatch:
    """Tokens, positions and block tables of one step; `sample_rows` are the entries that sample.

    A pooling entry samples nothing. `token_types`: the model reads them.
    """
    device = rows.tokens.device
    counts = np.asarray(plan.counts, np.int64)
    starts = np.asarray(plan.starts, np.int64)
    lengths = starts + counts
    bounds = np.concatenate([[0], counts.cumsum()])
    row_of_token = to_device(np.repeat(np.asarray(plan.rows, np.int64), counts), device)
    positions = to_device(
        np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], counts), device
    )  # fmt: skip
    columns = rows.columns[plan.rows]
    sampled = bounds[1:][np.asarray(plan.samples, np.bool_) & ~columns["pooling"]] - 1
    types = None
    if token_types:
        second = np.repeat(columns["second_at"], counts)
        place = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], counts)
        types = to_device(((second > 0) & (place >= second)).astype(np.int64), device)
    max_length = int(lengths.max())
    size = pool.block_size
    block = torch.div(positions, size, rounding_mode="floor")
    offset = positions - block * size
    entries = to_device(np.asarray(plan.rows, np.int64), device)
    used = -(-max_length // size)
    groups = [
        GroupBatch(
            tables=table[entries, :used],
            slots=table[row_of_token, block].long() * size + offset,
            window=group.window,
        )
        for table, group in zip(tables.tables, pool.groups, strict=True)
    ]
    return StepBatch(
        tokens=rows.tokens[row_of_token, positions].long(),
        positions=positions,
        query_starts=to_device(bounds.astype(np.int32), device),
        lengths=to_device(lengths.astype(np.int32), device),
        groups=groups,
        sample_rows=to_device(sampled, device),
        max_count=int(counts.max()),
        max_length=max_length,
        types=types,
        host=HostStep(counts, lengths),
    )
