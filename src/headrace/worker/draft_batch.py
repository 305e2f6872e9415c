"""CPU batches of steps that only verify drafts, in static buffers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.step import StepPlan
from ..kernels.operators import StepBatch
from .host_batch import HostBatches

_LOOPED = 24
"""Largest number of tokens in a step for which a loop over single numbers is faster than numpy's
calls."""


class DraftBatches(HostBatches):
    """Batches of a worker whose rows draft (`HostBatches`)."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._each_token = np.arange(_LOOPED)
        self._verifying: dict[tuple[int, int, int], StepBatch] = {}
        """Batches by tokens, entries and the width of their tables."""

    def decode(self, plan: StepPlan, drafted: list[int] | None = None) -> StepBatch | None:
        """Make a batch like `HostBatches.decode`, also for steps whose entries compute drafts after
        a token. The caller that compares the drafts records which of them count as computed."""
        if drafted is None:
            return super().decode(plan)
        count, total = len(plan.rows), sum(plan.counts)
        limits = self._limits
        if self._typed or total > limits.tokens or count > limits.entries:
            return None
        if total != count + sum(drafted) or not all(plan.samples):
            return None
        if total > _LOOPED:
            return self._mixed(plan, count, total, drafted)
        rows, size = self._array_of(plan.rows), self._pool.block_size
        known, _, tables, tokens, positions, lengths, bounds, all_slots = self._few
        at = longest = 0
        for place, (row, start, each) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, strict=True)
        ):
            end = start + each
            for position in range(start, end):
                positions[at], tokens[at] = position, known[row, position]
                block, offset = divmod(position, size)
                for table, slots in zip(tables, all_slots, strict=True):
                    slots[at] = table[row, block] * size + offset
                at += 1
            lengths[place] = end
            bounds[place + 1] = at
            longest = max(longest, end)
        width = self._pick(rows, longest)
        batch = self._verifying.get((total, count, width))
        if batch is None:
            batch = self._views(total, count, width, self._bounds, self._each_token[:total])
            batch.fixed = True
            self._verifying[total, count, width] = batch
        batch.max_count, batch.max_length = max(plan.counts), longest
        self._settle(plan, drafted)
        batch.rules = None if self._rules is None else self._rules.repeat(plan.counts)
        return batch
