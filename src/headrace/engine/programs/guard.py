"""The guard of a program: a self-test, a scrub of its bytes, and the mode that both decide.

Modes: normal; degraded: streams miss deadlines, so batch runs are refused; safe: its answers or
bytes have changed, so all runs are refused. A worse mode is entered at once, a better one step by
step and after a while.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import IntEnum

import numpy as np

from ...base.errors import HeadraceError, Overloaded
from ...programs.rows import Array, Feed, fitting
from ...sched.deadlines import BATCH
from .executor import ProgramRun, ServedProgram

log = logging.getLogger("headrace.programs")

TEST_SECONDS, SAFE_TEST_SECONDS, SCRUB_SECONDS = 60.0, 1.0, 600.0
"""Seconds between two self-tests, between two of a program in safe mode, and between two scrubs."""
WEIGHT, BAD, GOOD = 0.05, 0.3, 0.1
"""Weight of a run in the share of missed runs; the shares from which a program is degraded, and
below which it is normal again."""
HOLD_SECONDS = 10.0
"""Seconds that a mode lasts at least before a better one."""
PASSES = 3
"""Self-tests in a row that end safe mode."""


class Mode(IntEnum):
    NORMAL = 0
    DEGRADED = 1
    SAFE = 2


class ProgramGuard:
    """Mode of one program."""

    def __init__(
        self,
        program: ServedProgram,
        run: Callable[[Feed, float | None], Awaitable[dict[str, Array]]],
        count: Callable[[str, str], None],
    ) -> None:
        """Guard a program. `run` runs its self-tests, given their length in seconds if known.
        `count` gets `test` or `scrub`, and the outcome."""
        self._program, self._run, self._count = program, run, count
        self.mode, self.reason, self.since = Mode.NORMAL, "", time.time()
        self._moved = self._scrubbed = self._noted = time.monotonic()
        self._missed, self._passes, self._whole = 0.0, 0, True
        self._woken = asyncio.Event()
        self._seconds: float | None = None
        """Least length of a self-test."""
        self._answer: str | None = None
        """Digest of the expected outputs of a self-test; None: they are not repeatable, or the
        program does not run on made-up inputs."""
        self._bytes = self._digest()

    @property
    def trusted(self) -> bool:
        return self.mode is not Mode.SAFE

    def check(self, run: ProgramRun) -> None:
        """Raise `Overloaded` for a run that the mode does not allow."""
        if self.mode is Mode.SAFE or (self.mode is Mode.DEGRADED and run.urgency == BATCH):
            word = self.mode.name.lower()
            raise Overloaded(
                f"{self._program.name} is in mode {word} since {self.since:.3f}: {self.reason}",
                code=f"program_{word}",
                retry_after=HOLD_SECONDS,
            )

    def note(self, run: ProgramRun, outcome: str) -> None:
        """Note the end of a run. A miss counts only if the run had half of its stream's time."""
        if run.lane is None or outcome not in ("run", "missed_waiting", "missed_running"):
            return
        if outcome != "run" and run.deadline - run.arrival < run.due / 2:
            return
        self._noted = time.monotonic()
        self._missed += WEIGHT * ((outcome != "run") - self._missed)
        if self.mode is Mode.NORMAL and self._missed > BAD:
            self._move(Mode.DEGRADED, f"{self._missed:.0%} of its streams' runs are late")
        held = time.monotonic() - self._moved
        if self.mode is Mode.DEGRADED and self._missed < GOOD and held > HOLD_SECONDS:
            self._move(Mode.NORMAL, "")

    def _move(self, mode: Mode, reason: str) -> None:
        log.log(
            logging.ERROR if mode > self.mode else logging.INFO,
            "a program changes its mode",
            extra={"program": self._program.name, "mode": mode.name.lower(), "reason": reason},
        )
        self.mode, self.reason, self.since = mode, reason, time.time()
        self._moved, self._passes = time.monotonic(), 0
        self._woken.set()

    async def test(self) -> bool | None:
        """Run on the test's inputs and compare the outputs; None: it cannot be tested now. The
        first test sets the outputs that later ones must have."""
        passed = await self._tested()
        self._count("test", "skipped" if passed is None else "passed" if passed else "failed")
        if passed is False:
            self._move(Mode.SAFE, "its self-test has other outputs than at the start")
            self._program.confined.kill()  # Its replacement has other memory.
        elif passed and self.mode is Mode.SAFE and self._whole:
            self._passes += 1
            if self._passes >= PASSES and time.monotonic() - self._moved > HOLD_SECONDS:
                self._missed = BAD
                self._move(Mode.DEGRADED, "its self-test passes again")
        return passed

    async def _tested(self) -> bool | None:
        first, found = self._answer is None, list[str]()
        try:
            for _ in range(1 + first):
                begun = time.monotonic()
                found.append(_digest_of(await self._run(_inputs(self._program), self._seconds)))
                took = time.monotonic() - begun
                self._seconds = min(took, self._seconds or took)
        except HeadraceError:
            return None  # Too long for the streams' gaps, or its process is restarting.
        if first:
            self._answer = found[0] if found[0] == found[1] else None
            return True if self._answer else None
        return found[0] == self._answer

    async def scrub(self) -> bool:
        """Compare the program's bytes, from which its process is restarted, with those that were
        read. If they are damaged it stays in safe mode until the server restarts."""
        self._whole = await asyncio.to_thread(self._digest) == self._bytes
        self._count("scrub", "passed" if self._whole else "failed")
        if not self._whole:
            self._move(Mode.SAFE, "its bytes in memory are damaged")
        return self._whole

    def _digest(self) -> str:
        inspection, digest = self._program.confined.inspection, hashlib.sha256()
        for part in (inspection.data, *inspection.outside.values()):
            digest.update(part)
        return digest.hexdigest()

    async def keep(self) -> None:
        """Test and scrub forever."""
        while True:
            seconds = SAFE_TEST_SECONDS if self.mode is Mode.SAFE else TEST_SECONDS
            self._woken.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), seconds)
            if self._answer is not None:
                await self.test()
            if time.monotonic() - self._scrubbed > SCRUB_SECONDS:
                self._scrubbed = time.monotonic()
                await self.scrub()
            self._rest()

    def _rest(self) -> None:
        """Return to normal if no stream has run for a while to confirm the mode."""
        quiet = time.monotonic() - max(self._moved, self._noted) > HOLD_SECONDS
        if self.mode is Mode.DEGRADED and quiet:
            self._missed = 0.0
            self._move(Mode.NORMAL, "")


def _inputs(program: ServedProgram) -> Feed:
    """Make the inputs of all tests: free dimensions are 1, floats random, others 0."""
    draw, made = np.random.default_rng(0), {}
    for name, port in program.confined.inputs.items():
        shape = [dim if isinstance(dim, int) else 1 for dim in port.dims or ()]
        kind = np.dtype(port.type)
        floats = kind.kind == "f"
        made[name] = (draw.standard_normal(shape) if floats else np.zeros(shape)).astype(kind)
    return fitting(program.confined.inputs, made)


def _digest_of(outputs: dict[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(outputs):
        digest.update(name.encode() + outputs[name].tobytes())
    return digest.hexdigest()
