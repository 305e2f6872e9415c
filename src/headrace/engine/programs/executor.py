"""The executor: one queue over the runs of all programs, and lanes on which they run.

A lane is one thread of the machine. It has one run at a time, in any program's process, so programs
never compete for cores. Runs that can no longer end in time are not started. A run past its limit
is stopped before its next node. If that does not end it, its process is killed and replaced, and
the other runs of that process start again, once. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ...base.errors import (
    DeadlineMissed,
    EngineDead,
    HeadraceError,
    Overloaded,
    RunStopped,
    ShuttingDown,
)
from ...base.shares import Shares
from ...obs.tasks import TaskWatch
from ...programs.confined import GRACE_SECONDS, ConfinedProgram
from ...programs.measured import Shapes
from ...programs.rows import Array, Feed
from ...sched.deadlines import (
    BATCH,
    AdmittedStream,
    DeadlineQueue,
    Lanes,
    PeriodicStream,
    TimedWork,
)
from ...speech.program_voices import ProgramVoice
from .prices import RunPrices

log = logging.getLogger("headrace.programs")

MOST_WAITING = 1024
"""Most waiting runs of all programs; one key may have half of them."""
QUICK_DEATHS = 2
"""Ends of a program's process, without a run in between, after which its runs are refused."""
LONGEST_PAUSE = 30.0
SELF_TEST = "\0self-test"
"""Owner of self-test runs, which are not counted, measured or refused."""
LATELY = 60.0
"""Seconds after which shapes that no longer run cannot block a stream's admission."""

Result = dict[str, Array]


class ServedProgram:
    """A program and the measurements of its runs."""

    def __init__(
        self, name: str, confined: ConfinedProgram, voice: ProgramVoice | None = None
    ) -> None:
        self.name, self.confined = name, confined
        self.voice = voice
        """Files next to the program, with which it speaks."""
        self.licence: str | None = None
        self.prices = RunPrices()
        self.ready = False
        self.deaths = 0
        """Ends of its process since its last run."""
        self.restarts = 0
        self.restarting: asyncio.Task[None] | None = None
        self.guard: Any = None
        """`ProgramGuard`, which imports this module; None: it is not guarded yet."""

    @property
    def serves(self) -> bool:
        """Whether its process serves and its answers are trusted."""
        return self.ready and (self.guard is None or bool(self.guard.trusted))


@dataclass(eq=False, slots=True, kw_only=True)
class ProgramRun(TimedWork):
    """A run of a program, from its request to its answer."""

    program: ServedProgram
    feed: Feed
    shapes: Shapes
    seed: int
    owner: str
    future: asyncio.Future[Result]
    due: float = 0.0
    """Seconds from release to deadline of its stream."""
    priced: Collection[tuple[ServedProgram, Shapes]] = ()
    """Runs of its job whose expected lengths are or were in `rest`."""
    repeated: bool = False
    """Whether it was started before, in a process that died."""


@dataclass(frozen=True, slots=True)
class JobPart:
    """A run's place in a job; the job has one place in the queue for all its runs."""

    arrival: float
    rest: float
    """Expected seconds of the runs after it."""
    priced: Collection[tuple[ServedProgram, Shapes]]
    """Runs that add up to its price."""


@dataclass(eq=False, slots=True)
class _BusyLane:
    """A lane's run."""

    run: ProgramRun
    begun: float
    limit: float
    cause: str
    """Cause of its limit: time, deadline or streams; late: its deadline was reported as missed."""
    timer: asyncio.TimerHandle
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ProgramExecutor:
    """Runs of all programs, in order."""

    def __init__(
        self, lanes: int, tasks: TaskWatch, on_end: Callable[[ProgramRun, str, float, float], None]
    ) -> None:
        """Prepare for the running event loop. `on_end` is called with each run, its outcome (`run`
        or the code of an error), and the seconds that it waited and ran."""
        self.lanes = Lanes(lanes)
        self.queue = DeadlineQueue()
        self._tasks, self._on_end = tasks, on_end
        self._busy: list[_BusyLane | None] = [None] * lanes
        self._programs: list[ServedProgram] = []
        self._places = Shares(MOST_WAITING, "as many runs wait as are allowed")
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._alarm: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    @property
    def _closed(self) -> bool:
        return self._ended.is_set()

    @property
    def running(self) -> int:
        return sum(busy is not None for busy in self._busy)

    def add(self, program: ServedProgram) -> None:
        """Serve a program whose process has started."""
        self._programs.append(program)
        self._watch(program)

    def _watch(self, program: ServedProgram) -> None:
        for lane in range(self.lanes.count):
            answers = program.confined.answers(lane)
            self._loop.add_reader(answers, self._answered, program, lane)
        program.ready = True

    # Runs

    async def run(
        self,
        program: ServedProgram,
        feed: Feed,
        shapes: Shapes,
        *,
        seed: int,
        urgency: int,
        deadline: float = math.inf,
        release: float = -math.inf,
        admitted: AdmittedStream | None = None,
        owner: str = "",
        part: JobPart | None = None,
        seconds: float | None = None,
    ) -> Result:
        """Run a program on inputs that fit it. `deadline`, `release`: times of the event loop's
        clock; before `release` it has no real-time class. `admitted`: its stream; `part`: its place
        in a job; `seconds`: its length, if not the measured one of these shapes.

        Raises `DeadlineMissed`, `RunStopped`, `Overloaded`, `EngineDead`, and the run's own errors.
        If the caller is cancelled, its run is withdrawn or stopped.
        """
        now = self._loop.time()
        run = ProgramRun(
            order=self.number(),
            arrival=now if part is None else part.arrival,
            urgency=urgency if release <= now else BATCH,
            deadline=deadline,
            release=release if release > now else -math.inf,
            seconds=program.prices.usual(shapes) if seconds is None else seconds,
            rest=0.0 if part is None else part.rest,
            priced=() if part is None else part.priced,
            lane=None if admitted is None else admitted.lane,
            due=0.0 if admitted is None else admitted.stream.due,
            program=program,
            feed=feed,
            shapes=shapes,
            seed=seed,
            owner=owner,
            future=self._loop.create_future(),
        )
        self._check(run)
        with nullcontext() if part is not None else self.place(owner):
            try:
                self.queue.push(run)
                self._next()
                return await run.future
            except asyncio.CancelledError:
                self._leave(run)
                raise

    def number(self) -> int:
        """Return the next number by arrival."""
        return next(self._numbers) & 0xFFFFFFFF

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Hold a place in the queue. Raises `Overloaded`."""
        self._places.take(owner, 1)
        try:
            yield
        finally:
            self._places.give(owner, 1)

    def _check(self, run: ProgramRun) -> None:
        """Raise the error of a run that would never start."""
        if self._closed:
            raise ShuttingDown("the server is shutting down", retry_after=2.0)
        program = run.program
        if not program.ready and program.deaths > QUICK_DEATHS:
            raise EngineDead(f"{program.name} ends its process; it starts again", retry_after=5.0)
        _check_mode(run)
        if error := self._too_long(run):
            raise error

    def _too_long(self, run: ProgramRun) -> Overloaded | None:
        most = max(self.lanes.allowed)
        if run.lane is not None or run.seconds is None or run.seconds <= most:
            return None
        run.program.prices.refused(run.shapes)
        took, room = f"{run.seconds * 1e3:.1f} ms", f"{max(0.0, most) * 1e3:.1f}"
        return Overloaded(
            f"a run of {took} is too long beside the admitted streams, which leave {room}",
            code="blocks_streams",
        )

    def _next(self) -> None:
        """Start all runs that may start now."""
        now = self._loop.time()
        self.queue.ripen(now)
        for work in self.queue.hopeless(now):
            assert isinstance(work, ProgramRun)
            # The length, not the wait, is the reason: measure it again.
            if 2 * ((work.seconds or 0.0) + work.rest) > work.deadline - work.arrival:
                for program, shapes in {(work.program, work.shapes), *work.priced}:
                    program.prices.refused(shapes)
            self._end(work, _hopeless(work, now), "missed_waiting")
        for lane in range(self.lanes.count):
            while self._busy[lane] is None and (taken := self.queue.take(lane, self.lanes, _ready)):
                run, room = taken
                assert isinstance(run, ProgramRun)
                if self._began(lane, run, room, now):
                    break
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Schedule `_next` for when a run can no longer end in time, or becomes real-time."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if (moment := min(self.queue.next_latest() + 1e-4, self.queue.next_release())) < math.inf:
            self._alarm = self._loop.call_at(moment, self._next)

    def _began(self, lane: int, run: ProgramRun, room: float, now: float) -> bool:
        program = run.program
        limit, cause = min(
            (program.confined.limits.seconds, "time"),
            (room, "streams"),
            (run.deadline - now, "deadline"),
        )
        try:
            _check_mode(run)
            program.confined.begin(lane, run.order, run.feed, seed=run.seed, seconds=limit)
        except EngineDead:
            self.queue.push(run)
            self._lost(program)
            return False
        except HeadraceError as error:
            self._end(run, error, error.code or error.type)
            return False
        timer = self._loop.call_later(limit + GRACE_SECONDS, self._stuck, lane)
        self._busy[lane] = _BusyLane(run, now, limit, cause, timer)
        return True

    def _answered(self, program: ServedProgram, lane: int) -> None:
        """Handle the end of a run or of a process."""
        busy = self._busy[lane]
        streamed = busy is not None and busy.run.lane is not None
        streamed &= self.lanes.allowed[lane] < math.inf  # Else the last stream has just ended.
        try:  # The next frame of a stream finds its memory there.
            result: Result | HeadraceError = program.confined.finish(lane, keep=streamed)
        except EngineDead:
            self._lost(program)
            return
        except HeadraceError as error:
            result = error
        if busy is None or busy.run.program is not program:
            return
        self._free(lane)
        program.deaths = 0
        run, seconds = busy.run, self._loop.time() - busy.begun
        if not isinstance(result, HeadraceError):
            if run.owner != SELF_TEST:
                program.prices.observe(run.shapes, seconds, self._loop.time())
            if self._loop.time() <= run.deadline:
                self._end(run, result, "run", seconds)
            else:
                self._end(run, _overran(seconds), "missed_running", seconds)
        elif isinstance(result, RunStopped) and busy.cause != "time" and result.code == "time":
            if run.owner != SELF_TEST:
                program.prices.exceeded(run.shapes, seconds, self._loop.time())
            if busy.cause == "streams":
                self._end(run, _cut(seconds), "blocks_streams", seconds)
            else:
                self._end(run, _overran(seconds), "missed_running", seconds)
        else:
            self._end(run, result, result.code or result.type, seconds)
        self._next()

    def _free(self, lane: int) -> None:
        busy = self._busy[lane]
        assert busy is not None
        busy.timer.cancel()
        busy.over.set()
        self._busy[lane] = None

    def _end(
        self, run: ProgramRun, result: Result | HeadraceError, outcome: str, seconds: float = 0.0
    ) -> None:
        waited = max(0.0, self._loop.time() - run.arrival - seconds)
        self._on_end(run, "left" if run.future.cancelled() else outcome, waited, seconds)
        if run.future.done():
            return  # The caller has left.
        if isinstance(result, HeadraceError):
            run.future.set_exception(result)
        else:
            run.future.set_result(result)

    def _leave(self, run: ProgramRun) -> None:
        """Drop a run whose caller has left, or stop it before its next node."""
        if self.queue.discard(run):
            self._on_end(run, "left", self._loop.time() - run.arrival, 0.0)
        for lane, busy in enumerate(self._busy):
            if busy is not None and busy.run is run:
                run.program.confined.stop(lane, run.order)
                if self._is_alone(busy):
                    busy.timer.cancel()
                    busy.timer = self._loop.call_later(GRACE_SECONDS, self._stuck, lane)

    def _is_alone(self, busy: _BusyLane) -> bool:
        """Whether no other run is in that run's process."""
        program = busy.run.program
        return all(one in (None, busy) or one.run.program is not program for one in self._busy)

    # Processes

    def _stuck(self, lane: int) -> None:
        """Kill the process of a run that goes on after its limit: one of its nodes does not end. A
        missed deadline, which the sender chose, must not cost other runs of that process: then the
        run goes on to the program's limit."""
        busy = self._busy[lane]
        assert busy is not None
        name, run = busy.run.program.name, busy.run
        words = f"{name} did not stop within {busy.limit:g} s, its limit"
        last = busy.begun + run.program.confined.limits.seconds + GRACE_SECONDS
        if busy.cause == "deadline" and not self._is_alone(busy) and self._loop.time() < last:
            busy.cause, busy.timer = "late", self._loop.call_at(last, self._stuck, lane)
            if not run.future.done():
                run.future.set_exception(DeadlineMissed(words))
            return
        self._free(lane)
        seconds = self._loop.time() - busy.begun
        words += ", and was killed"
        if busy.cause in ("deadline", "late"):
            self._end(busy.run, DeadlineMissed(words), "missed_running", seconds)
        else:
            self._end(busy.run, RunStopped(words, code="time"), "killed", seconds)
        self._lost(busy.run.program)

    def _lost(self, program: ServedProgram) -> None:
        """Replace a program's process; its other runs start again, once."""
        if not program.ready:
            return
        program.ready = False
        program.deaths += 1
        for lane in range(self.lanes.count):
            self._loop.remove_reader(program.confined.answers(lane))
        program.confined.kill()
        error = EngineDead(f"the process of {program.name} has ended", retry_after=1.0)
        for lane, busy in enumerate(self._busy):
            if busy is None or busy.run.program is not program:
                continue
            self._free(lane)
            if busy.run.repeated or busy.run.future.done() or self._closed:
                self._end(busy.run, error, "engine_dead", self._loop.time() - busy.begun)
            else:
                busy.run.repeated = True
                self.queue.push(busy.run)
        if program.deaths > QUICK_DEATHS:
            self._refuse(program, error)
        if not self._closed:
            restart = self._replace(program)
            program.restarting = self._tasks.errand(f"restart of {program.name}", restart)
        self._next()

    def _refuse(self, program: ServedProgram, error: HeadraceError) -> None:
        for work in self.queue.waiting():
            if isinstance(work, ProgramRun) and work.program is program:
                self.queue.discard(work)
                self._end(work, error, error.code or error.type)

    async def _replace(self, program: ServedProgram) -> None:
        while True:
            if program.deaths > QUICK_DEATHS:
                pause = 0.5 * 2.0 ** min(10, program.deaths - QUICK_DEATHS)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), min(LONGEST_PAUSE, pause))
            if self._closed:
                return
            try:
                await asyncio.to_thread(program.confined.reap)
                await asyncio.to_thread(program.confined.start)
            except Exception as error:
                log.exception("the process of %s does not start again", program.name)
                program.deaths += 1
                why = f"the process of {program.name} does not start again: {error}"
                self._refuse(program, EngineDead(why, retry_after=LONGEST_PAUSE))
                continue
            if self._closed:
                return
            program.restarts += 1
            self._watch(program)
            self._next()
            return

    # Streams

    async def admit(self, stream: PeriodicStream) -> AdmittedStream:
        """Admit a periodic stream, given the longest run of recently used shapes; longer runs are
        refused from now on. Returns when its lane has no earlier run. Raises `Overloaded`."""
        since = self._loop.time() - LATELY
        blocking = max((one.prices.longest_since(since) for one in self._programs), default=0.0)
        admitted = self.lanes.admit(stream, blocking)
        for work in self.queue.waiting():
            assert isinstance(work, ProgramRun)
            if error := self._too_long(work):
                self.queue.discard(work)
                self._end(work, error, "blocks_streams")
        busy = self._busy[admitted.lane]
        if busy is not None:
            try:
                await busy.over.wait()
            except asyncio.CancelledError:
                self.lanes.leave(admitted)
                raise
        return admitted

    def dismiss(self, admitted: AdmittedStream, program: ServedProgram) -> None:
        """End a stream of a program's runs, and give back the memory that they kept."""
        self.lanes.leave(admitted)
        busy = self._busy[admitted.lane]
        if program.ready and (busy is None or busy.run.program is not program):
            program.confined.relieve(admitted.lane)
        self._next()

    async def close(self) -> None:
        """End all runs and processes."""
        self._ended.set()
        error = ShuttingDown("the server is shutting down", retry_after=2.0)
        for program in self._programs:
            self._refuse(program, error)
            self._lost(program)
        for program in self._programs:
            program.confined.kill()
            if program.restarting is not None:
                await asyncio.wait({program.restarting})
            await asyncio.to_thread(program.confined.close)
        if self._alarm is not None:
            self._alarm.cancel()


def _ready(work: TimedWork) -> bool:
    return isinstance(work, ProgramRun) and work.program.ready


def _check_mode(run: ProgramRun) -> None:
    """Raise `Overloaded` if the mode of a run's program does not allow it."""
    if run.program.guard is not None and run.owner != SELF_TEST:
        run.program.guard.check(run)


def _hopeless(run: ProgramRun, now: float) -> DeadlineMissed:
    waited, took = (now - run.arrival) * 1e3, run.seconds
    why = f"a run takes {took * 1e3:.1f} ms" if took else "its deadline is over"
    if run.rest:
        why += f", and those after it {run.rest * 1e3:.1f} ms"
    if run.urgency == BATCH:
        why += ", and batch comes last"
    return DeadlineMissed(f"not begun after {waited:.1f} ms: {why}")


def _overran(seconds: float) -> DeadlineMissed:
    return DeadlineMissed(f"stopped at its deadline, after a run of {seconds * 1e3:.1f} ms")


def _cut(seconds: float) -> Overloaded:
    words = f"stopped after {seconds * 1e3:.1f} ms: longer runs would delay the admitted streams"
    return Overloaded(words, code="blocks_streams")
