"""Whole sequences as one step: blocks one after the other, nothing computed before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..base.graph import Graph
from ..base.groups import graph_groups
from ..base.step import PoolShape
from ..kernels.arrays import Array, tensor
from ..kernels.operators import GroupBatch, HostStep, StepBatch
from .statistic import Windows

BLOCK = 16


def pool_of(graph: Graph, windows: Windows, kv_dtype: str) -> PoolShape:
    """Return blocks for these sequences, each from its beginning."""
    tokens = 1 + sum(-(-len(window) // BLOCK) for window in windows)
    groups = (
        group._replace(blocks=1 + len(windows) if group.state else tokens)
        for group in graph_groups(graph, kv_dtype)
    )
    return PoolShape(BLOCK, tuple(groups))


def batch_of(windows: Windows, pool: PoolShape, *, host: bool = False) -> StepBatch:
    """Make the step that computes these sequences whole; `host`: of numpy's arrays."""
    view: Callable[[Any], Array] = (lambda array: array) if host else tensor
    counts = np.array([len(window) for window in windows], np.int64)
    places = np.concatenate([np.arange(count) for count in counts])
    bounds = np.concatenate([[0], counts.cumsum()])
    blocks = -(-counts // BLOCK)
    begins = 1 + np.concatenate([[0], blocks.cumsum()[:-1]])
    each = np.arange(int(blocks.max()))
    tables = np.where(each < blocks[:, None], begins[:, None] + each, 0).astype(np.int32)
    slots = np.repeat(begins * BLOCK, counts) + places
    states = np.arange(1, 1 + len(windows), dtype=np.int32)[:, None]
    sampled = bounds[1:] - 1
    return StepBatch(
        tokens=view(np.concatenate(windows)),
        positions=view(places),
        query_starts=view(bounds.astype(np.int32)),
        lengths=view(counts.astype(np.int32)),
        groups=[
            GroupBatch(view(states if group.state else tables), view(slots), group.window)
            for group in pool.groups
        ],
        sample_rows=view(sampled),
        max_count=int(counts.max()),
        max_length=int(counts.max()),
        types=view(np.zeros(int(bounds[-1]), np.int64)),
        host=HostStep(counts, counts, sampled),
    )
