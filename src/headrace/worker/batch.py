"""Forward-pass inputs, made from a plan's columns and the worker's tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.step import PoolShape, StepPlan
from ..kernels.arrays import tensor
from ..kernels.attention_plan import COLUMNS, Planner
from ..kernels.draws import DrawParameters
from ..kernels.operators import STATE_COLUMNS, GroupBatch, HostStep, StepBatch
from .rows import BlockTables, Rows
from .transfer import all_to_device


def make_batch(
    plan: StepPlan,
    drafted: list[int] | None,
    rows: Rows,
    tables: BlockTables,
    pool: PoolShape,
    *,
    token_types: bool = False,
    draws: bool = False,
    planner: Planner | None = None,
) -> StepBatch:
    """Make a step's tokens, positions and block tables as tensors on the device.

    `sample_rows` are the tokens that sample; a pooling entry samples nothing. `token_types`: the
    model reads them. `draws`: include how tokens are drawn and where they go, so that a step is one
    copy to the device. `drafted`: the drafts of each entry, as `Verification.begin` has them.
    `planner`: divides the step's attention among thread blocks.
    """
    known = tensor(rows.tokens)
    device = known.device
    counts = np.asarray(plan.counts, np.int64)
    starts = np.asarray(plan.starts, np.int64)
    lengths = starts + counts
    bounds = np.concatenate([[0], counts.cumsum()])
    owners = np.repeat(np.asarray(plan.rows, np.int64), counts)
    place = np.arange(bounds[-1]) + np.repeat(starts - bounds[:-1], counts)
    columns = rows.columns[plan.rows]
    samples = np.asarray(plan.samples, np.bool_) & ~columns["pooling"]
    sampled, sampling = sampled_tokens(bounds, samples, drafted)
    size = pool.block_size
    arrays = [
        owners,
        place,
        place // size,
        place % size,
        np.asarray(plan.rows, np.int64),
        np.asarray(sampled, np.int64),
        bounds.astype(np.int32),
        lengths.astype(np.int32),
    ]
    if token_types:
        second = np.repeat(columns["second_at"], counts)
        arrays.append(((second > 0) & (place >= second)).astype(np.int64))
    drawn: dict[str, npt.NDArray[Any]] = {}
    if draws:
        places = place[sampled] + 1
        arrays.append(owners[sampled] * known.shape[1] + places)
        drawn = rows.draws(columns[sampling], places)
        arrays += drawn.values()
    lists = [] if planner is None else planner.lists(counts, lengths)
    arrays += [each.ravel() for each in lists]
    # Changes of the tables go in the same copy; they are read below.
    arrays = [*tables.deltas.take(), *rows.deltas.take(), *arrays]
    places, blocks, at, ids, *sent = all_to_device(arrays, device)
    tables.deltas.apply(places, blocks)
    rows.deltas.apply(at, ids)
    row_of_token, positions, block, offset, entries, sample_rows, query_starts, ends, *more = sent
    types = more.pop(0) if token_types else None
    targets = more.pop(0) if draws else None
    parameters = dict.fromkeys(DrawParameters.__slots__) | {name: more.pop(0) for name in drawn}
    attention = None
    if planner is not None:
        attention = planner.plan([each.view(-1, COLUMNS) for each in more], counts)
    max_length = int(lengths.max())
    used = -(-max_length // size)
    groups = [
        GroupBatch(
            tables=table[entries, :used],
            slots=offset.add(table[row_of_token, block], alpha=size),
            window=group.window,
        )
        for table, group in zip(map(tensor, tables.tables), pool.groups, strict=True)
    ]
    states, turns, reach = None, rows.turns(plan), rows.reach(plan)
    if any(group.state for group in pool.groups):
        own = np.zeros((len(plan.rows), STATE_COLUMNS), np.int32)
        states = rows.settle_states(plan, drafted, own)
    return StepBatch(
        tokens=known[row_of_token, positions].long(),
        positions=positions,
        query_starts=query_starts,
        lengths=ends,
        groups=groups,
        sample_rows=sample_rows,
        max_count=int(counts.max()),
        max_length=max_length,
        types=types,
        host=HostStep(counts, lengths, sampled),
        draws=DrawParameters(**parameters) if drawn else None,
        plan=attention,
        targets=targets,
        adapters=rows.adapters(plan.rows, plan.counts),
        encoded=rows.encoded(plan),
        turns=None if turns is None else tensor(turns).to(device),
        reach=None if reach is None else tensor(reach).to(device),
        states=states,
    )


def sampled_tokens(
    bounds: npt.NDArray[np.signedinteger[Any]],
    samples: npt.NDArray[np.bool_],
    drafted: list[int] | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (tokens [R] whose logits are wanted, the entry [R] of each), ascending.

    Entry b owns the tokens bounds[b] : bounds[b + 1]. It samples after its last token and after the
    token that precedes each draft.
    """
    (entries,) = samples.nonzero()
    ends = bounds[1:][entries].astype(np.int64) - 1
    if drafted is None:
        return ends, entries
    each = 1 + np.array(drafted)[entries].clip(0)  # Nothing is drawn before a granted token.
    behind = np.repeat(each.cumsum() - 1, each) - np.arange(each.sum())
    return np.repeat(ends, each) - behind, np.repeat(entries, each)
