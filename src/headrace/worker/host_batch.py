"""The batch of a step on the CPU: static buffers, written in place.

`batch.make_batch` makes new tensors for every step: a device whose steps overlap needs that. On the
CPU a step ends before the next one is prepared, so its arrays are views of buffers that live as
long as the worker. A step that decodes the same rows as the last one gets the same `StepBatch`;
only its numbers change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.step import PoolShape, StepPlan
from ..kernels.arrays import Array, tensor
from ..kernels.operators import STATE_COLUMNS, GroupBatch, StepBatch, StepLimits
from .batch import make_batch, sampled_tokens
from .rows import BlockTables, Rows

_FEW = 3
_LOOPED = 24
"""Largest number of tokens in a step that verifies drafts for which a loop over single numbers is
faster than numpy's calls."""
_TABLE_STEP = 8
"""Multiple of blocks to which tables are cut, so that their view seldom changes."""


class _Few(NamedTuple):
    """Views of host memory for access to single numbers."""

    known: memoryview
    """Token of [row, place]."""
    computed: memoryview
    """`Rows.computed`."""
    tables: list[memoryview]
    """By group, block of [row, block]."""
    tokens: memoryview
    positions: memoryview
    lengths: memoryview
    bounds: memoryview
    slots: list[memoryview]


class HostBatches:
    """Maker of the same batches as `make_batch`; a batch is valid until the next call."""

    def __init__(
        self,
        rows: Rows,
        tables: BlockTables,
        pool: PoolShape,
        limits: StepLimits,
        *,
        token_types: bool = False,
        tensors: bool = False,
    ) -> None:
        """Allocate the buffers. `token_types`: the model reads them; `tensors`: the batch has torch
        tensors."""
        self._view: Callable[[Array], Array] = tensor if tensors else _same
        self._rows, self._tables, self._pool, self._limits = rows, tables, pool, limits
        self._types = np.zeros(limits.tokens if token_types else 0, np.int64)
        self._typed = token_types
        self._tokens = np.zeros(limits.tokens, np.int64)
        self._positions = np.zeros(limits.tokens, np.int64)
        # The first number stays 0.
        self._bounds = np.zeros(limits.entries + 1, np.int32)
        self._lengths = np.zeros(limits.entries, np.int32)
        self._sampled = np.zeros(limits.samples, np.int64)
        self._slots = [np.zeros(limits.tokens, np.int64) for _ in pool.groups]
        self._picked = [np.zeros((limits.entries, tables.width), np.int32) for _ in pool.groups]
        self._states: npt.NDArray[np.int32] | None = None
        if any(group.state for group in pool.groups):
            self._states = np.zeros((limits.entries, STATE_COLUMNS), np.int32)
        self._each = np.arange(limits.tokens)
        # In decoding steps entry i is token i and samples.
        self._each_entry = np.arange(limits.entries)
        self._each_bound = np.arange(limits.entries + 1, dtype=np.int32)
        # For single numbers: numpy's own indexing takes several times as long.
        self._few = _Few(
            rows.host_tokens.data,
            rows.computed.data,
            [table.data for table in tables.host],
            self._tokens.data,
            self._positions.data,
            self._lengths.data,
            self._bounds.data,
            [slots.data for slots in self._slots],
        )
        self._decoding: StepBatch | None = None
        self._verifying: dict[tuple[int, int, int], StepBatch] = {}
        """Batches that verify drafts, by tokens, entries and the width of their tables."""
        self._starts: list[int] = []
        self._of: list[int] = []
        """Rows of the last step."""
        self._rows_array: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Rows of the last step as an array."""
        self._rules: npt.NDArray[np.void] | None = None
        """Sampling rules of the rows of the last step."""
        self._rows_version = -1
        """Value of `Rows.version` that `_rules` belongs to."""
        self._picked_version = self._picked_width = -1
        """`BlockTables.version` and width that `_picked` was copied from; -1: not copied yet."""

    def make(self, plan: StepPlan, drafted: list[int] | None = None) -> StepBatch:
        if self._rows.pictured is not None:
            return self._rows.pictured(plan)
        count = len(plan.rows)
        total = sum(plan.counts)
        if total > self._limits.tokens or count > self._limits.entries:
            return make_batch(
                plan, drafted, self._rows, self._tables, self._pool, token_types=self._typed
            )
        plain = not self._typed and self._rows.ranked is None
        if total == count and plain and all(plan.samples) and not self._turned(plan):
            columns = self._rows.columns[plan.rows]
            if not columns["pooling"].any() and (columns["adapter"] < 0).all():
                return self._decode(plan, count)
        return self._mixed(plan, count, total, drafted)

    def decode(self, plan: StepPlan, drafted: list[int] | None = None) -> StepBatch | None:
        """Make the batch of a step in which every entry computes one token, and drafts after it if
        there are any, and gets a token for each. Its rows neither pool nor have an adapter. None
        for any other step. The caller that compares the drafts records which count as computed."""
        count, total = len(plan.rows), sum(plan.counts)
        if self._typed or total > self._limits.tokens or count > self._limits.entries:
            return None
        if self._turned(plan):
            return None
        if total != count + (0 if drafted is None else sum(drafted)) or not all(plan.samples):
            return None
        if drafted is None:
            return self._decode(plan, count)
        if total > _LOOPED:
            return self._mixed(plan, count, total, drafted)
        return self._verify_few(plan, count, total, drafted)

    def _turned(self, plan: StepPlan) -> bool:
        """Return whether a rope turns a token of the step by other numbers than its position."""
        return self._rows.turns(plan) is not None

    def keep(self, tokens: list[int]) -> None:
        """Write each row's new token after its computed ones; after `decode`, the step's tokens."""
        if len(tokens) <= _FEW:
            known = self._few.known
            for row, start, token in zip(self._of, self._starts, tokens, strict=True):
                known[row, start + 1] = token
        else:
            self._rows.host_tokens[self._rows_array, self._lengths[: len(tokens)]] = tokens

    def _array_of(self, rows: list[int]) -> npt.NDArray[np.int64]:
        """Return `rows` as an array, kept from the step before if they are the same."""
        if self._of != rows or self._rows_version != self._rows.version:
            self._of, self._rows_array = rows, np.array(rows)
            self._rules = self._rows.rules(self._rows_array)
            self._rows_version = self._rows.version
            self._picked_version = -1
        return self._rows_array

    def _decode(self, plan: StepPlan, count: int) -> StepBatch:
        """Make the batch of one token per entry, all sampled."""
        max_length = max(plan.starts) + 1
        rows, self._starts = self._array_of(plan.rows), plan.starts
        if count <= _FEW:
            self._decode_few(plan)
        else:
            starts = self._positions[:count]
            starts[:] = plan.starts
            np.add(starts, 1, out=self._lengths[:count], casting="unsafe")
            self._rows.computed[rows] = self._lengths[:count]
            self._tokens[:count] = self._rows.host_tokens[rows, starts]
            self._place(rows, starts, count)
        width = self._pick(rows, max_length)
        batch = self._decoding
        if batch is None or len(batch.tokens) != count or batch.groups[0].tables.shape[1] != width:
            batch = self._decoding = self._views(
                count, count, width, self._each_bound, self._each_entry[:count]
            )
            batch.fixed = True
        batch.max_length = max_length
        batch.rules = self._rules
        self._settle(plan)
        return self._with_inputs(plan, batch)

    def _verify_few(self, plan: StepPlan, count: int, total: int, drafted: list[int]) -> StepBatch:
        """Make the batch of a step of few tokens that verifies drafts."""
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
            batch = self._views(total, count, width, self._bounds, self._each[:total])
            batch.fixed = True
            self._verifying[total, count, width] = batch
        batch.max_count, batch.max_length = max(plan.counts), longest
        self._settle(plan, drafted)
        batch.rules = None if self._rules is None else self._rules.repeat(plan.counts)
        return self._with_inputs(plan, batch)

    def _with_inputs(self, plan: StepPlan, batch: StepBatch) -> StepBatch:
        """Write which inputs the tokens attend to, if the model does that."""
        if self._rows.across is not None:
            batch.across, batch.fixed = self._rows.across(plan, batch), False
        return batch

    def _settle(self, plan: StepPlan, drafted: list[int] | None = None) -> None:
        """Write which states the step reads and leaves, if the model has states."""
        if self._states is not None:
            self._rows.settle_states(plan, drafted, self._states)

    def _decode_few(self, plan: StepPlan) -> None:
        """Fill the buffers for few rows, where one numpy call costs more than a loop."""
        known, computed, tables, tokens, positions, lengths, _, all_slots = self._few
        size = self._pool.block_size
        for place, (row, start) in enumerate(zip(plan.rows, plan.starts, strict=True)):
            positions[place] = start
            lengths[place] = computed[row] = start + 1
            tokens[place] = known[row, start]
            block, offset = divmod(start, size)
            for table, slots in zip(tables, all_slots, strict=True):
                slots[place] = table[row, block] * size + offset

    def _mixed(
        self, plan: StepPlan, count: int, total: int, drafted: list[int] | None
    ) -> StepBatch:
        rows, starts = self._array_of(plan.rows), np.array(plan.starts)
        counts = np.array(plan.counts)
        lengths = starts + counts
        self._lengths[:count] = lengths
        bounds = self._bounds[: count + 1]
        np.cumsum(counts, out=bounds[1:])
        row_of_token = np.repeat(rows, counts)
        positions = self._positions[:total]
        np.add(self._each[:total], np.repeat(starts - bounds[:-1], counts), out=positions)
        self._tokens[:total] = self._rows.host_tokens[row_of_token, positions]
        self._place(row_of_token, positions, total)
        samples = np.array(plan.samples) & ~self._rows.columns["pooling"][rows]
        sampled, sampling = sampled_tokens(bounds, samples, drafted)
        self._sampled[: len(sampled)] = sampled
        max_length = int(lengths.max())
        width = self._pick(rows, max_length)
        batch = self._views(total, count, width, self._bounds, self._sampled[: len(sampled)])
        batch.max_count, batch.max_length = int(counts.max()), max_length
        batch.rules = self._rows.rules(rows[sampling])
        self._settle(plan, drafted)
        batch.adapters = self._rows.adapters(rows, counts)
        batch.encoded, turns = self._rows.encoded(plan), self._rows.turns(plan)
        batch.turns = None if turns is None else self._view(turns)
        reach = self._rows.reach(plan)
        batch.reach = None if reach is None else self._view(reach)
        if self._rows.ranked is not None:
            batch.ranked = self._rows.ranked(plan)
        if self._typed:
            second = np.repeat(self._rows.columns["second_at"][rows], counts)
            self._types[:total] = (second > 0) & (positions >= second)
            batch.types = self._view(self._types)[:total]
        return self._with_inputs(plan, batch)

    def _place(self, rows: np.ndarray, positions: np.ndarray, total: int) -> None:
        """Compute the slots of each token's K and V."""
        size = self._pool.block_size
        block = positions // size
        offset = positions - block * size
        for table, slots in zip(self._tables.host, self._slots, strict=True):
            np.multiply(table[rows, block], size, out=slots[:total], casting="unsafe")
            slots[:total] += offset

    def _pick(self, rows: npt.NDArray[np.int64], max_length: int) -> int:
        """Copy the tables of these rows; return the copied width."""
        used = -(-max_length // self._pool.block_size)
        width = min(-(-used // _TABLE_STEP) * _TABLE_STEP, self._tables.width)
        same = self._picked_version == self._tables.version and self._picked_width == width
        if not same:
            for table, picked in zip(self._tables.host, self._picked, strict=True):
                picked[: len(rows), :width] = table[rows, :width]
            self._picked_version, self._picked_width = self._tables.version, width
        return width

    def _views(
        self,
        total: int,
        count: int,
        width: int,
        bounds: npt.NDArray[np.int32],
        sampled: npt.NDArray[np.int64],
    ) -> StepBatch:
        view = self._view
        groups = [
            GroupBatch(view(picked)[:count, :width], view(slots)[:total], group.window)
            for picked, slots, group in zip(
                self._picked, self._slots, self._pool.groups, strict=True
            )
        ]
        return StepBatch(
            tokens=view(self._tokens)[:total],
            positions=view(self._positions)[:total],
            query_starts=view(bounds)[: count + 1],
            lengths=view(self._lengths)[:count],
            groups=groups,
            sample_rows=view(sampled),
            max_count=1,
            max_length=0,
            states=None if self._states is None else self._states[:count],
        )


def _same(array: Array) -> Array:
    return array
