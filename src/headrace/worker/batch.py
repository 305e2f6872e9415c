"""A plan's columns and the worker's tables → the tensors that a forward pass reads."""

from __future__ import annotations

import numpy as np
import torch

from ..base.step import PoolShape, StepPlan
from ..kernels.operators import GroupBatch, StepBatch
from .rows import BlockTables, Rows


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
    row_of_token = torch.from_numpy(np.repeat(np.asarray(plan.rows, np.int64), counts)).to(device)
    positions = torch.from_numpy(
        np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], counts)
    ).to(device)
    columns = rows.columns[plan.rows]
    sampled = bounds[1:][np.asarray(plan.samples, np.bool_) & ~columns["pooling"]] - 1
    types = None
    if token_types:
        second = np.repeat(columns["second_at"], counts)
        place = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], counts)
        types = torch.from_numpy(((second > 0) & (place >= second)).astype(np.int64)).to(device)
    max_length = int(lengths.max())
    size = pool.block_size
    block = torch.div(positions, size, rounding_mode="floor")
    offset = positions - block * size
    entries = torch.tensor(plan.rows, device=device)
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
        query_starts=torch.from_numpy(bounds.astype(np.int32)).to(device),
        lengths=torch.from_numpy(lengths.astype(np.int32)).to(device),
        groups=groups,
        sample_rows=torch.from_numpy(sampled).to(device),
        max_count=int(counts.max()),
        max_length=max_length,
        types=types,
    )
