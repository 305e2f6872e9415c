"""A program that runs: checked inputs, a time limit, draws from the seed, prices per shape."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest, ModelFileError, RunStopped
from . import library
from .drawn import FIRST, rewritten
from .inspection import LIMITS, Inspection, Limits, State, inspected
from .onnx import Port
from .rows import Rows, Verdict, join, split, varied
from .trial import Trial, plain, tried

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
REPEATS = 5
CHEAPER = 0.97
"""Rows go together if that takes at most so much of their time one by one."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Measured shapes of all inputs."""

    shapes: Shapes
    nanoseconds: int
    """Median of warm runs."""


class Program:
    """A loaded program. `run` may be called from one thread at a time, `cancel` from any."""

    def __init__(
        self,
        inspection: Inspection,
        limits: Limits = LIMITS,
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
        self.trial: Trial | None = tried(inspection, data, limits) if trial else None
        try:
            self._session = library.session(
                data,
                inspection.outside,
                fixed=not self.drawn and all(one.fixed for one in inspection.described.inputs),
                threads=threads,
                memory=limits.memory + 2 * inspection.weights,
            )
        except Exception as error:  # noqa: BLE001 - the library has no class of its own
            raise ModelFileError(f"{inspection.name} does not load: {plain(error)}") from None
        self.inputs = inspection.described.inputs
        self.outputs = inspection.described.graph.outputs
        self.buckets: dict[Shapes, Bucket] = {}
        self.verdicts: dict[Shapes, Verdict] = {}
        self._names = [one.name for one in self.outputs]
        self._asked = self._names + [one.needed for one in self.drawn if one.needed]
        self._checks = {one.name: _Check(one) for one in self.inputs}
        self._counts = {one.input: FIRST for one in self.drawn}
        self._running: set[Any] = set()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: Path, limits: Limits = LIMITS, *, threads: int = 1) -> Program:
        """Inspect a file and load it. Raises as `inspected` and the class."""
        return cls(inspected(path, limits), limits, threads=threads)

    @property
    def states(self) -> tuple[State, ...]:
        return self.inspection.states

    def start(self, rows: int = 1) -> dict[str, Array]:
        """Return the states of `rows` new sequences: zeros."""
        return {
            one.input: np.zeros(
                [dim if isinstance(dim, int) else rows for dim in one.dims], one.type
            )
            for one in self.states
        }

    def step(self, inputs: Feed, states: Feed, *, seed: int = 0) -> tuple[dict[str, Array], ...]:
        """Run with states; return the other outputs, and the states after the run."""
        found = self.run({**inputs, **states}, seed=seed)
        return found, {one.input: found.pop(one.output) for one in self.states}

    def run(self, inputs: Feed, *, seed: int = 0, seconds: float | None = None) -> dict[str, Array]:
        """Run once; `seconds` lowers the time limit.

        The result depends on inputs and seed alone. Raises `InvalidRequest` for inputs that the
        program cannot take, and `RunStopped` after the time limit or `cancel`.
        """
        feed = self.checked(inputs)
        limit = self.limits.seconds if seconds is None else min(seconds, self.limits.seconds)
        end = time.monotonic() + limit
        while True:
            for at, one in enumerate(self.drawn):
                feed[one.input] = one.values(seed, at, self._counts[one.input])
            values = dict(zip(self._asked, self._once(feed, end, limit), strict=True))
            if not self._short(values):
                return {name: values[name] for name in self._names}

    def _short(self, values: Mapping[str, Array]) -> bool:
        """Whether the run needed more draws than it was given; the next one gets them."""
        short = False
        for one in self.drawn:
            needed = 0 if one.needed is None else int(values[one.needed])
            if needed * 8 > self.limits.memory:
                raise InvalidRequest(
                    f"{self.inspection.name}: {needed:,} draws exceed the limit of memory, "
                    f"{self.limits.memory:,} bytes"
                )
            if needed > self._counts[one.input]:
                self._counts[one.input], short = 1 << (needed - 1).bit_length(), True
        return short

    def _once(self, feed: Feed, end: float, limit: float) -> Sequence[Array]:
        options = library.run_options()
        with self._lock:
            self._running.add(options)
        try:
            with library.CLOCK.limit(options, max(0.0, end - time.monotonic())):
                found: Sequence[Array] = self._session.run(self._asked, feed, options)
                return found
        except Exception as error:  # noqa: BLE001 - the library has no class of its own
            raise self._failed(error, options, limit) from None
        finally:
            library.CLOCK.late(options)
            self._running.discard(options)

    def _failed(self, error: Exception, options: Any, limit: float) -> InvalidRequest | RunStopped:
        name = self.inspection.name
        if library.CLOCK.late(options):
            return RunStopped(f"{name} was stopped after {limit:g} s, its time limit", code="time")
        if options.terminate:
            return RunStopped(f"the run of {name} was cancelled", code="cancelled")
        return InvalidRequest(f"{name} cannot run on these inputs: {plain(error)}", param="inputs")

    def cancel(self) -> None:
        """Stop the run before its next node, if there is one."""
        with self._lock:
            for options in self._running:
                options.terminate = True

    def checked(self, inputs: Feed) -> dict[str, Array]:
        """Return the inputs as the library takes them. Raises `InvalidRequest`."""
        if inputs.keys() != self._checks.keys():
            strange = sorted(inputs.keys() - self._checks.keys())
            missing = [name for name in self._checks if name not in inputs]
            raise InvalidRequest(
                f"input {strange[0]!r:.80} is not known; the inputs are: {', '.join(self._checks)}"
                if strange
                else f"input {missing[0]!r:.80} is missing",
                param="inputs",
            )
        return {name: self._checks[name](value) for name, value in inputs.items()}

    def shapes(self, inputs: Feed) -> Shapes:
        """Return the key of a bucket."""
        return tuple((name, np.shape(inputs[name])) for name in self._checks)

    def warm(self, inputs: Feed) -> Bucket:
        """Run with these inputs until it is warm, measure, and keep the bucket."""
        times = []
        for _ in range(REPEATS + 1):
            begun = time.perf_counter_ns()
            self.run(inputs)
            times.append(time.perf_counter_ns() - begun)
        key = self.shapes(inputs)
        self.buckets[key] = Bucket(key, int(statistics.median(times[1:])))
        return self.buckets[key]

    def price(self, shapes: Shapes) -> int | None:
        """Return nanoseconds of a run: those of its bucket, or else of the cheapest one that is at
        least as large in every dimension; None beyond all of them."""
        if shapes in self.buckets:
            return self.buckets[shapes].nanoseconds
        covering = [one.nanoseconds for one in self.buckets.values() if _covers(one.shapes, shapes)]
        return min(covering, default=None)

    @cached_property
    def rows(self) -> Rows | str:
        """Dimensions that count rows, or the reason why rows never go together."""
        if self.drawn:
            return "it draws numbers, and each row has its own seed"
        return Rows.of(self.inputs, self.outputs, self.states)

    def prove(self, inputs: Feed, count: int) -> Verdict:
        """Try `count` rows like this one together: each output must have the bits it has alone, in
        either order, and the processor's time must be less. The verdict holds for these shapes."""
        verdict = self._proven(inputs, count)
        if not isinstance(self.rows, str):
            self.verdicts[(*self.shapes(inputs), ("", (count,)))] = verdict
        return verdict

    def _proven(self, inputs: Feed, count: int) -> Verdict:
        rows = self.rows
        if isinstance(rows, str):
            return Verdict(count, False, rows)
        feeds = [varied(inputs, rows, seed) for seed in range(count)]
        alone = [self.run(feed) for feed in feeds]
        for order in (range(count), range(count - 1, -1, -1)):
            together = self.run(join([feeds[at] for at in order], rows))
            parts = split(together, rows, count)
            if isinstance(parts, str):
                return Verdict(count, False, parts)
            for at, part in zip(order, parts, strict=True):
                if differs := _differs(alone[at], part):
                    return Verdict(count, False, f"{differs} in row {at}")
        joined = join(feeds, rows)
        one_by_one, at_once = [], []
        for _ in range(REPEATS):
            begun = time.process_time_ns()
            for feed in feeds:
                self.run(feed)
            middle = time.process_time_ns()
            self.run(joined)
            one_by_one.append(middle - begun)
            at_once.append(time.process_time_ns() - middle)
        single, whole = int(statistics.median(one_by_one)), int(statistics.median(at_once))
        cheap = whole <= CHEAPER * single
        reason = "equal, and cheaper" if cheap else "equal, but not cheaper"
        return Verdict(count, cheap, reason, single, whole)

    def run_rows(self, feeds: Sequence[Feed]) -> list[dict[str, Array]]:
        """Run rows of one shape: together if that was proven for this many, else one by one."""
        key = *self.shapes(feeds[0]), ("", (len(feeds),))
        verdict, rows = self.verdicts.get(key), self.rows
        alike = all(self.shapes(feed) == key[:-1] for feed in feeds)
        if verdict is None or not verdict.together or not alike or isinstance(rows, str):
            return [self.run(feed) for feed in feeds]
        if not rows.shared_alike(feeds):
            return [self.run(feed) for feed in feeds]
        parts = split(self.run(join(feeds, rows)), rows, len(feeds))
        return parts if not isinstance(parts, str) else [self.run(feed) for feed in feeds]


class _Check:
    """The form of an input."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.type = np.dtype(port.type)
        self.free = port.dims is None

    def __call__(self, value: Array) -> Array:
        port = self.port
        if not isinstance(value, np.ndarray) or value.dtype != self.type:
            given = getattr(value, "dtype", type(value).__name__)
            raise InvalidRequest(
                f"input {port.name:.80} is {given}; it takes {port.type}", param="inputs"
            )
        if not self.free and (
            len(port.dims or ()) != value.ndim
            or any(
                isinstance(want, int) and want != size
                for want, size in zip(port.dims or (), value.shape, strict=True)
            )
        ):
            raise InvalidRequest(
                f"input {port.name:.80} has the shape {list(value.shape)}; it takes {port}",
                param="inputs",
            )
        return np.ascontiguousarray(value).reshape(value.shape)


def _covers(large: Shapes, small: Shapes) -> bool:
    return all(
        len(ours) == len(theirs) and all(a >= b for a, b in zip(ours, theirs, strict=True))
        for (_, ours), (_, theirs) in zip(large, small, strict=True)
    )


def _differs(alone: Feed, together: Feed) -> str:
    """Name the output whose bits differ, and by how much; empty if none does."""
    for name, value in alone.items():
        other = together[name]
        if value.shape != other.shape:
            return f"output {name} is {list(other.shape)} instead of {list(value.shape)}"
        if value.tobytes() != other.tobytes():
            with np.errstate(invalid="ignore"):
                most = np.abs(value.astype(np.float64) - other.astype(np.float64)).max()
            return f"output {name} differs by {most:.1e}"
    return ""
