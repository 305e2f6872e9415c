"""Measurements of a program, wherever it runs: prices per shape, and whether rows go together."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..base.errors import InvalidRequest
from .drawn import random_nodes
from .inspection import Inspection, StateTensor
from .rows import Array, Feed, RowAxes, alike, differs, join, split, varied

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every input."""
REPEATS = 5
CHEAPER = 0.97
"""Rows go together if that takes at most so much of their time one by one."""


@dataclass(frozen=True, slots=True)
class RowsVerdict:
    """Whether rows of one shape may go together."""

    together: bool
    reason: str
    alone_ns: int = 0
    """Processor time of the rows one by one, and of all at once; 0 if the bits already differ."""
    joined_ns: int = 0


class MeasuredProgram(ABC):
    """A program that can be run and measured."""

    def __init__(self, inspection: Inspection) -> None:
        self.inspection = inspection
        self.inputs = {one.name: one for one in inspection.described.inputs}
        self.buckets: dict[Shapes, int] = {}
        """Measured shapes → nanoseconds, the median of warm runs."""
        self.verdicts: dict[tuple[Shapes, int], RowsVerdict] = {}
        """(Shapes of a row, number of rows) → verdict."""

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return self.inspection.states

    @abstractmethod
    def run(self, inputs: Feed, *, seed: int = 0) -> dict[str, Array]:
        """Run once. Raises `InvalidRequest` for inputs that the program cannot take."""

    @abstractmethod
    def processor_ns(self) -> int:
        """Return the nanoseconds of the processor that its runs have taken."""

    def shapes(self, inputs: Feed) -> Shapes:
        """Return the key of a bucket."""
        return shapes_of(self.inputs, inputs)

    def warm(self, inputs: Feed) -> int:
        """Run with these inputs until it is warm; keep and return the nanoseconds of a run."""
        times = []
        for _ in range(REPEATS + 1):
            begun = time.perf_counter_ns()
            self.run(inputs)
            times.append(time.perf_counter_ns() - begun)
        self.buckets[self.shapes(inputs)] = found = int(statistics.median(times[1:]))
        return found

    def price(self, shapes: Shapes) -> int | None:
        """Return nanoseconds of a run: of its bucket, else of the cheapest one that is at least as
        large in every dimension; None beyond all of them."""
        covering = [cost for bucket, cost in self.buckets.items() if covers(bucket, shapes)]
        return self.buckets.get(shapes, min(covering, default=None))

    @cached_property
    def rows(self) -> RowAxes | str:
        """Dimensions that count rows, or the reason why rows never go together."""
        if random_nodes(self.inspection.described):
            return "it draws numbers, and each row has its own seed"
        outputs = self.inspection.described.graph.outputs
        return RowAxes.of([*self.inputs.values()], outputs, self.states)

    def prove(self, inputs: Feed, count: int) -> RowsVerdict:
        """Try `count` rows like this one together: each output must have the bits it has alone, in
        either order, and the processor's time must be less. The verdict holds for these shapes."""
        rows = self.rows
        if isinstance(rows, str):
            verdict = RowsVerdict(False, rows)
        else:
            verdict = self._proven([varied(inputs, rows, seed) for seed in range(count)], rows)
        self.verdicts[self.shapes(inputs), count] = verdict
        return verdict

    def _proven(self, feeds: list[dict[str, Array]], rows: RowAxes) -> RowsVerdict:
        try:
            alone = [self.run(feed) for feed in feeds]
        except InvalidRequest as refused:
            return RowsVerdict(False, f"rows of other values do not run: {refused}")
        if like := alike(feeds, rows):
            return RowsVerdict(False, f"input {like} has one value in every row: nothing is proven")
        for order in (range(len(feeds)), range(len(feeds) - 1, -1, -1)):
            parts = split(self.run(join([feeds[at] for at in order], rows)), rows, len(feeds))
            if isinstance(parts, str):
                return RowsVerdict(False, parts)
            for at, part in zip(order, parts, strict=True):
                if found := differs(alone[at], part):
                    return RowsVerdict(False, f"{found} in row {at}")
        joined, times = join(feeds, rows), []
        for _ in range(REPEATS):
            begun = self.processor_ns()
            for feed in feeds:
                self.run(feed)
            middle = self.processor_ns()
            self.run(joined)
            times.append((middle - begun, self.processor_ns() - middle))
        single, whole = (int(statistics.median(one)) for one in zip(*times, strict=True))
        cheap = whole <= CHEAPER * single
        reason = "equal, and cheaper" if cheap else "equal, but not cheaper"
        return RowsVerdict(cheap, reason, single, whole)

    def run_rows(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Run rows: together if that was proven for this many of their one shape."""
        rows, shapes = self.rows, self.shapes(feeds[0])
        verdict = self.verdicts.get((shapes, len(feeds)))
        if isinstance(rows, str) or verdict is None or not verdict.together:
            return [self.run(feed) for feed in feeds]
        if any(self.shapes(feed) != shapes for feed in feeds) or not rows.shared_alike(feeds):
            return [self.run(feed) for feed in feeds]
        parts = split(self.run(join(feeds, rows)), rows, len(feeds))
        return [self.run(feed) for feed in feeds] if isinstance(parts, str) else parts


def shapes_of(names: Iterable[str], inputs: Feed) -> Shapes:
    """Return the key of a bucket: the shapes of these inputs."""
    return tuple((name, np.shape(inputs[name])) for name in names)


def covers(large: Shapes, small: Shapes) -> bool:
    """Tell whether every input of `large` is at least as large in every dimension."""
    return all(
        len(ours) == len(theirs) and all(a >= b for a, b in zip(ours, theirs, strict=True))
        for (_, ours), (_, theirs) in zip(large, small, strict=True)
    )
