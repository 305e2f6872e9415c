"""The worker's tables: one permanent row per sequence from its admission to its release.

Tokens and block tables lie on the device and change by deltas, so a step ships only new values; on
the CPU they are arrays of the host. Sampling parameters of a row lie in columns on the host, where
a step picks its rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import EngineFault
from ..base.spec import SEEDS, WORKER_FEATURES
from ..base.step import (
    MOST_DRAFTS,
    MOST_KEEPS,
    NULL_BLOCK,
    Admission,
    BlockWrite,
    PoolShape,
    StepPlan,
)
from ..kernels.arrays import Array, host, stride, tensor
from ..kernels.draws import RULE, streams, uniforms
from ..kernels.encoded import EncodedRows
from ..kernels.operators import StepBatch
from ..kernels.ranked import RankedRows
from .transfer import to_device

UNKNOWN = -1
_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("greedy", np.bool_),
        ("seed", np.uint64),
        ("choice", np.int64),
        ("pooling", np.bool_),
        ("second_at", np.int64),
        ("adapter", np.int32),
    ]
)
"""Numbers of one row. `adapter` is its slot, -1 for none."""


class Rows:
    """Token ids, lengths and sampling parameters of each row."""

    def __init__(
        self, rows: int, max_context: int, device: str, features: Collection[str] = ()
    ) -> None:
        """Allocate the tables. `features`: the worker's abilities beyond text, see
        `WorkerFacts.features`."""
        self._features = features
        # One place more than the context: the last token may be sampled but is never computed.
        self.tokens = _on(device, np.zeros((rows, max_context + 1), np.int32))
        self.host_tokens = _of_host(self.tokens)
        """Host array of `tokens` if they lie there; else empty."""
        self.deltas = Deltas(self.tokens)
        """Prompts that wait for the device."""
        self.columns: npt.NDArray[np.void] = np.zeros(rows, _ROW)
        self.columns["adapter"] = -1
        self.held = np.zeros(rows, np.bool_)
        self.encoded: Callable[[StepPlan], EncodedRows | None] = lambda plan: None
        """Finder of the rows of encodings in a step."""
        self.turns: Callable[[StepPlan], npt.NDArray[np.int64] | None] = lambda plan: None
        """Finder of `StepBatch.turns`."""
        self.reach: Callable[[StepPlan], npt.NDArray[np.int64] | None] = lambda plan: None
        """Finder of `StepBatch.reach`."""
        self.across: Callable[[StepPlan, StepBatch], StepBatch] | None = None
        """Maker of `StepBatch.across`; None: the model attends to no inputs."""
        self.ranked: Callable[[StepPlan], RankedRows] | None = None
        """Finder of `StepBatch.ranked`; None: the model is no ranker."""
        self.pictured: Callable[[StepPlan], StepBatch] | None = None
        """Maker of the batches of pictures; None: the model draws none."""
        self.version = 0
        """Number that changes with every admission."""
        self.computed = np.zeros(rows, np.int64)
        """Computed tokens of each row after all launched steps. It counts where a plan's starts are
        upper bounds. `UNKNOWN` before a row's first step."""
        self._settled = np.zeros(rows, np.int32)
        """Number of tokens in each row's state; `UNKNOWN` before its first step."""

    def admit(self, admission: Admission) -> None:
        """Fill a row; raises `EngineFault` for features that this worker lacks."""
        row, spec = admission.row, admission.spec
        sampling = spec.sampling
        assert not self.held[row], f"row {row} is taken"
        for name in ("adapter", "grammar", "inputs"):
            if getattr(spec, name) and name not in self._features:
                raise EngineFault(f"this worker has no support for {name}")
        pooled = WORKER_FEATURES.get(spec.task, "pooling")
        if not spec.generates and pooled not in self._features:
            raise EngineFault(f"this worker has no support for {pooled}")
        if len(admission.tokens) > self.tokens.shape[1]:
            raise EngineFault(f"{len(admission.tokens)} tokens do not fit into a row")
        ids = np.asarray(admission.tokens, np.int32)
        if len(self.host_tokens):
            self.host_tokens[row, : len(ids)] = ids
        else:
            self.deltas.add((row, 0), ids)
        assert 0 <= spec.seed < SEEDS, "a seed is resolved before a request is sent"
        self.columns[row] = (
            max(sampling.temperature, 1e-5),
            max(sampling.top_k, 0),
            sampling.top_p,
            sampling.min_p,
            sampling.greedy,
            spec.seed,
            admission.choice,
            not spec.predicts,
            spec.second_at,
            -1,
        )
        self.held[row] = True
        self.begin_anew(row)
        self.version += 1

    def begin_anew(self, row: int) -> None:
        """Reset a row's counts: its next step's start will be its number of computed tokens."""
        self.computed[row] = self._settled[row] = UNKNOWN

    def check_starts(self, plan: StepPlan) -> None:
        """Assert that a plan's starts are the computed counts, as they are without drafting."""
        known = self.computed[plan.rows]
        starts = np.where(known == UNKNOWN, plan.starts, known)
        assert starts.tolist() == plan.starts, f"computed {starts.tolist()}, not {plan.starts}"

    def note_computed(self, plan: StepPlan) -> None:
        """Note that this step was launched."""
        self.computed[plan.rows] = np.add(plan.starts, plan.counts)

    def settle_states(
        self, plan: StepPlan, drafted: list[int] | None, columns: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Fill `StepBatch.states` of a step that is computed now, in the first rows of `columns`:
        after the step the states hold all of its tokens but drafts."""
        columns = columns[: len(plan.rows)]
        columns[:, 2:] = 0
        # Number by number: six numpy calls for a few numbers took a tenth of a millisecond, cold.
        lines, settled = columns.data, self._settled.data
        for entry, (row, start) in enumerate(zip(plan.rows, plan.starts, strict=True)):
            known = settled[row] if settled[row] != UNKNOWN else start
            assert 0 <= start - known <= MOST_DRAFTS, f"{start - known} tokens behind a state"
            certain = plan.counts[entry] - (0 if drafted is None else abs(drafted[entry]))
            lines[entry, 0], lines[entry, 1] = known, certain
            settled[row] = start + certain
        for keep in plan.keeps:
            entry = plan.rows.index(keep.row)
            place = 2 if not columns[entry, 2] else 4
            assert place == 2 or not columns[entry, 4], f"more than {MOST_KEEPS} checkpoints"
            columns[entry, place : place + 2] = keep.at, keep.block
        return columns

    def adapters(
        self, rows: npt.NDArray[np.int64] | list[int], counts: list[int] | npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32] | None:
        """Return `StepBatch.adapters` of entries with these rows and counts."""
        slots = self.columns["adapter"][rows]
        if (slots < 0).all():
            return None
        found: npt.NDArray[np.int32] = np.repeat(slots, counts)
        return found

    def rules(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.void] | None:
        """Return `StepBatch.rules` of rows [R]; None if all are greedy."""
        columns = self.columns[rows]
        if columns["greedy"].all():
            return None
        rules = np.zeros(len(rows), RULE)
        for name in ("temperature", "min_p", "top_p"):
            rules[name] = columns[name]
        rules["temperature"][columns["greedy"]] = 0
        rules["top_k"] = np.minimum(columns["top_k"], 2**31 - 1)
        rules["stream"] = streams(columns["seed"], columns["choice"])
        return rules

    def draws(
        self, columns: npt.NDArray[np.void], places: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any]]:
        """Return `DrawParameters` by name, of rows [R] with these `columns` whose next tokens will
        stand at `places`.

        Filters that no row asks for are left out; the result is empty if all rows are greedy.
        """
        greedy = columns["greedy"]
        if greedy.all():
            return {}
        # A greedy row keeps only its largest logit, of equals the first.
        found: dict[str, npt.NDArray[Any]] = {
            "temperature": np.where(greedy, np.float32(1), columns["temperature"]),
            "min_p": np.where(greedy, np.float32(1), columns["min_p"]),
            "uniform": np.where(greedy, 0.0, uniforms(columns["seed"], columns["choice"], places)),
        }
        for name, off in (("top_k", 0), ("top_p", np.float32(1))):
            values = np.where(greedy, off, columns[name])
            if (values != off).any():
                found[name] = values.astype(columns[name].dtype)
        return found

    def release(self, rows: Sequence[int]) -> None:
        if rows:
            self.held[list(rows)] = False

    def append(
        self,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        tokens: Array,
        targets: Array | None = None,
    ) -> None:
        """Write each row's new token [R] to its place, on the device; `targets` are the places
        there, as `StepBatch` has them."""
        if targets is not None:
            # A token that is none ends its sequence; a step in flight may still look it up.
            tensor(self.tokens).view(-1)[targets] = tokens.clamp(min=0).int()
        else:
            self.host_tokens[rows, places] = host(tokens)


class BlockTables:
    """Block tables [rows, blocks of a whole context] of each layer group."""

    def __init__(self, rows: int, max_context: int, pool: PoolShape, device: str) -> None:
        self.width = -(-max_context // pool.block_size)
        groups = len(pool.groups)
        self._storage = _on(device, np.full((groups, rows, self.width), NULL_BLOCK, np.int32))
        self.tables = [self._storage[group] for group in range(groups)]
        self.host = [_of_host(table) for table in self.tables]
        """Host arrays of `tables` if they lie there; else empty."""
        self.version = 0
        """Number that changes with every change of a table."""
        self.deltas = Deltas(self._storage)
        self._used = [[0] * rows for _ in range(groups)]
        """By group and row: places of a table on a device that may have a block."""

    def write(self, writes: Sequence[BlockWrite]) -> None:
        """Apply deltas; those of a device wait for its next step."""
        if not writes:
            return
        self.version += 1
        for row, group, first, appended in writes:
            end = first + len(appended)
            assert end <= self.width, "a table is too long"
            if len(self.host[0]):
                self.host[group][row, first:end] = appended
            else:
                self._used[group][row] = max(end, self._used[group][row])
                self.deltas.add((group, row, first), appended)

    def release(self, rows: Sequence[int]) -> None:
        if rows:
            self.version += 1
            if isinstance(self._storage, np.ndarray):
                self._storage[:, list(rows)] = NULL_BLOCK
            else:
                for group, used in enumerate(self._used):
                    for row in rows:
                        if used[row]:
                            self.deltas.add((group, row, 0), [NULL_BLOCK] * used[row])
                            used[row] = 0


class Deltas:
    """Numbers for places of an int32 array, which wait to go to its device with a step's inputs."""

    def __init__(self, target: Array) -> None:
        self._target = target
        self._strides = [stride(target, at) for at in range(target.ndim)]
        self._waiting: list[tuple[int, npt.NDArray[np.int32]]] = []

    def add(self, index: tuple[int, ...], values: Sequence[int] | npt.NDArray[np.int32]) -> None:
        first = sum(place * step for place, step in zip(index, self._strides, strict=True))
        self._waiting.append((first, np.asarray(values, np.int32)))

    def take(self) -> list[npt.NDArray[Any]]:
        """Return the waiting changes for `apply`: places of the flat array, each once, int64, and
        their values."""
        waiting, self._waiting = [(0, np.zeros(0, np.int32)), *self._waiting], []
        places = np.concatenate([np.arange(first, first + len(some)) for first, some in waiting])
        values = np.concatenate([some for _, some in waiting])
        if len(waiting) > 2:
            # The later one wins if two are for one place; a scatter has no such order.
            places, last = np.unique(places[::-1], return_index=True)
            values = values[::-1][last]
        return [places, values]

    def apply(self, places: Array, values: Array) -> None:
        if len(places):
            tensor(self._target).view(-1)[tensor(places)] = tensor(values)


def _on(device: str, values: npt.NDArray[np.int32]) -> Array:
    return values if device == "cpu" else to_device(values, device)


def _of_host(array: Array) -> npt.NDArray[np.int32]:
    return array if isinstance(array, np.ndarray) else np.zeros((0, 0), np.int32)
