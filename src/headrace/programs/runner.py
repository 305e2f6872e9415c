"""A program that runs: checked inputs, a time limit, draws from the seed."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import InvalidRequest, ModelFileError, RunStopped
from .confined import Trial, tried
from .drawn import FIRST, rewritten
from .inspection import LIMITS, Inspection, ProgramLimits, inspected
from .library import CLOCK, plain, run_options, session
from .measured import MeasuredProgram, Shapes
from .rows import Array, Feed, fitting

MOST_SHAPES = 256
"""Shapes after which a program is loaded anew without plans of memory, which nothing drops."""


class ForeignProgram(MeasuredProgram):
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
        super().__init__(inspection)
        self.limits = limits
        data, self.drawn = rewritten(inspection.data, inspection.described)
        self.trial: Trial | None = tried(inspection, limits) if trial else None
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

    def processor_ns(self) -> int:
        return time.process_time_ns()

    def cancel(self) -> None:
        """Stop all runs before their next nodes."""
        with self._lock:
            for options in self._running:
                options.terminate = True
