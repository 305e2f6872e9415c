"""A program that runs: checked inputs, a time limit, draws from the seed, prices per shape."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import InvalidRequest, ModelFileError, RunStopped
from .confined import Trial, tried
from .drawn import FIRST, rewritten
from .inspection import LIMITS, Inspection, ProgramLimits, StateTensor, inspected
from .library import CLOCK, plain, run_options, session
from .rows import Array, Feed, RowAxes, alike, differs, fitting, join, split, varied

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of every input."""
MOST_SHAPES = 256
"""Shapes after which a program is loaded anew without plans of memory, which nothing drops."""
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


class ForeignProgram:
    """A loaded program. Its methods may be called from any thread."""

    def __init__(
        self,
        inspection: Inspection,
        limits: ProgramLimits = LIMITS,
        *,
        threads: int = 1,
        trial: bool = True,
    ) -> None:
        """Load what was inspected; `trial`: in a confined child first.

        Raises `PackageAbsent`, `UnsupportedModel`, `ModelFileError`, `DoesNotFit`.
        """
        self.inspection = inspection
        self.limits = limits
        data, self.drawn = rewritten(inspection.data, inspection.described)
        self.trial: Trial | None = tried(inspection, limits) if trial else None
        self.inputs = {one.name: one for one in inspection.described.inputs}
        self._load = partial(
            session,
            data,
            inspection.outside,
            threads=threads,
            memory=limits.memory + 2 * inspection.weights,
        )
        try:
            self._session = self._load(patterns=not self.drawn)
        except Exception as error:  # noqa: BLE001 - the library has no class of its own
            raise ModelFileError(f"{inspection.name} does not load: {plain(error)}") from None
        self._seen: set[Shapes] | None = None if self.drawn else set()
        """Shapes for which the library keeps a plan of memory; None: it keeps none."""
        self.buckets: dict[Shapes, int] = {}
        """Measured shapes → nanoseconds, the median of warm runs."""
        self.verdicts: dict[tuple[Shapes, int], RowsVerdict] = {}
        """(Shapes of a row, number of rows) → verdict."""
        self._names = [one.name for one in inspection.described.graph.outputs]
        self._asked = self._names + [one.needed for one in self.drawn if one.needed]
        self._counts = {one.input: FIRST for one in self.drawn}
        self._running: set[Any] = set()
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls, path: Path, limits: ProgramLimits = LIMITS, *, threads: int = 1
    ) -> ForeignProgram:
        """Inspect a file and load it. Raises as `inspected` and the class."""
        return cls(inspected(path, limits), limits, threads=threads)

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return self.inspection.states

    def start(self, rows: int = 1) -> dict[str, Array]:
        """Return the states of `rows` new sequences: zeros."""
        free = [[dim if isinstance(dim, int) else rows for dim in one.dims] for one in self.states]
        return {
            one.input: np.zeros(dims, one.type) for one, dims in zip(self.states, free, strict=True)
        }

    def step(self, inputs: Feed, states: Feed, *, seed: int = 0) -> tuple[dict[str, Array], ...]:
        """Run with states; return the other outputs, and the states after the run."""
        found = self.run({**inputs, **states}, seed=seed)
        return found, {one.input: found.pop(one.output) for one in self.states}

    def run(
        self,
        inputs: Feed,
        *,
        seed: int = 0,
        seconds: float | None = None,
        options: Any = None,
    ) -> dict[str, Array]:
        """Run once; `seconds` lowers the time limit. `options`: those of `run_options`, with which
        another thread can stop this run alone.

        The result depends on inputs and seed alone. Raises `InvalidRequest` for inputs that the
        program cannot take, and `RunStopped` after the time limit or `cancel`.
        """
        feed = fitting(self.inputs, inputs)
        limit = self.limits.seconds if seconds is None else min(self.limits.seconds, seconds)
        options, end = options or run_options(), time.monotonic() + limit
        with self._lock:
            self._running.add(options)
        try:
            with self._lock:
                if self._seen is not None:
                    self._seen.add(self.shapes(feed))
                    if len(self._seen) > MOST_SHAPES:
                        self._session, self._seen = self._load(patterns=False), None
            with CLOCK.limit(options, end):
                while True:
                    for at, one in enumerate(self.drawn):
                        feed[one.input] = one.values(seed, at, self._counts[one.input])
                    found = self._session.run(self._asked, feed, options)
                    values = dict(zip(self._asked, found, strict=True))
                    if not self._short(values, feed):
                        return {name: values[name] for name in self._names}
        except InvalidRequest:
            raise
        except Exception as error:  # noqa: BLE001 - the library has no class of its own
            name = self.inspection.name
            if not options.terminate:
                why = f"{name} cannot run on these inputs: {plain(error)}"
                raise InvalidRequest(why, param="inputs") from None
            if time.monotonic() < end:
                raise RunStopped(f"the run of {name} was cancelled", code="cancelled") from None
            why = f"{name} was stopped after {limit:g} s, its time limit"
            raise RunStopped(why, code="time") from None
        finally:
            with self._lock:
                self._running.discard(options)

    def _short(self, values: Feed, feed: Feed) -> bool:
        """Whether the run needed more draws than it was given; the next one gets them."""
        short = False
        for one in self.drawn:
            needed = int(values[one.needed]) if one.needed else 0
            if needed * 16 > self.limits.memory:
                most = f"the limit of memory, {self.limits.memory:,} bytes"
                raise InvalidRequest(f"{self.inspection.name}: {needed:,} draws exceed {most}")
            if needed > feed[one.input].size:
                more = 1 << (needed - 1).bit_length()
                self._counts[one.input], short = max(more, self._counts[one.input]), True
        return short

    def cancel(self) -> None:
        """Stop all runs before their next nodes."""
        with self._lock:
            for options in self._running:
                options.terminate = True

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
        if self.drawn:
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
            begun = time.process_time_ns()
            for feed in feeds:
                self.run(feed)
            middle = time.process_time_ns()
            self.run(joined)
            times.append((middle - begun, time.process_time_ns() - middle))
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
