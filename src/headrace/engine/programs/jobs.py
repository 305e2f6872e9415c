"""Jobs: requests of several runs of several programs, under one deadline.

A job's runs wait in the queue of all runs, with the job's arrival, class and deadline. So more
urgent work goes between two of them, and a job whose caller leaves ends there. Its price is the sum
of its announced runs: a run that leaves too little time for the rest is not started. A job holds
arrays between its runs, so the number of started jobs is limited.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...base.errors import DeadlineMissed, HeadraceError, ShuttingDown
from ...programs.measured import Shapes, shapes_of
from ...programs.rows import Feed, fitting
from ...sched.deadlines import CLASSES, INTERACTIVE, TimedWork
from .executor import JobPart, ProgramExecutor, Result, ServedProgram

Item = TypeVar("Item")
Beside = Callable[..., Awaitable[Any]]
"""Runs a function with its arguments off the event loop, and returns its result."""


@dataclass(eq=False, slots=True)
class ProgramJob:
    """One request's runs."""

    name: str
    executor: ProgramExecutor
    work: TimedWork
    """Order, arrival, class and deadline of all its runs."""
    turns: JobTurns
    owner: str
    owed: float = 0.0
    """Expected seconds of the runs that will come."""
    begun: bool = True
    """Whether it has a turn."""
    _prices: dict[tuple[ServedProgram, Shapes], float] = field(default_factory=dict)
    """Looked up once for all runs of a shape: a job may announce thousands."""
    _priced: set[tuple[ServedProgram, Shapes]] = field(default_factory=set)
    """Keys of the prices that are not 0."""

    def expect(self, program: ServedProgram, shapes: Shapes) -> float:
        """Announce a run; return its expected length, which `run` takes. If it was not measured
        with exactly these shapes it is 0: lengths of larger ones could add up to far too much."""
        key = program, shapes
        if key not in self._prices:
            self._prices[key] = program.prices.own(shapes) or 0.0
            if self._prices[key]:
                self._priced.add(key)
        self.owed += self._prices[key]
        return self._prices[key]

    async def run(
        self, program: ServedProgram, inputs: Feed, expected: float = 0.0, *, seed: int = 0
    ) -> Result:
        """Run a program. `expected`: the value of `expect` if the run was announced. Raises as
        `ProgramExecutor.run`, and `InvalidRequest` for inputs that do not fit."""
        self.owed = max(0.0, self.owed - expected)
        feed, work = fitting(program.confined.inputs, inputs), self.work
        return await self.executor.run(
            program,
            feed,
            shapes_of(program.confined.inputs, feed),
            seed=seed,
            urgency=work.urgency,
            deadline=work.deadline,
            owner=self.owner,
            part=JobPart(work.arrival, self.owed / self.executor.lanes.count, self._priced),
        )

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Give the turn to other jobs inside a block in which this one waits for its client and
        holds little memory."""
        self.begun = False
        self.turns.give(self.owner)
        yield
        await self.turns.take(self.work, self.owner)
        self.begun = True

    async def each(
        self, items: Iterable[Item], work: Callable[[Item], Coroutine[Any, Any, None]]
    ) -> None:
        """Do the work of all items in order, as many at a time as there are lanes. The first error
        ends the others."""
        left = iter(items)

        async def some() -> None:
            for item in left:
                await work(item)

        tasks = [asyncio.ensure_future(some()) for _ in range(self.executor.lanes.count)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


class JobTurns:
    """Turns of the jobs of one class. The owner with the fewest turns gets the next one, for its
    job with the earliest deadline. No key may hold all turns."""

    def __init__(self, count: int) -> None:
        """`count`: most jobs with a turn at a time."""
        self._free, self._most = count, max(1, count - 1)
        self._begun: Counter[str] = Counter()
        self._waiting: dict[str, list[tuple[tuple[int, float, int], asyncio.Future[None]]]] = {}
        """By owner, and by rank."""

    async def take(self, work: TimedWork, owner: str = "") -> None:
        """Wait for a turn."""
        turn = asyncio.get_running_loop().create_future()
        insort(self._waiting.setdefault(owner, []), (work.rank, turn))
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._discard(owner, work)
            elif turn.exception() is None:
                self.give(owner)  # Its turn came just as its caller left.
            raise

    def _discard(self, owner: str, work: TimedWork) -> None:
        mine = self._waiting.get(owner, [])
        place = bisect_left(mine, (work.rank,))
        if place < len(mine) and mine[place][0] == work.rank:
            self._pop(owner, place)

    def give(self, owner: str = "") -> None:
        """End a turn."""
        self._free += 1
        self._begun -= Counter([owner])
        self._next()

    def _next(self) -> None:
        while self._free:
            ready = [
                (self._begun[owner], mine[0][0], owner)
                for owner, mine in self._waiting.items()
                if not owner or self._begun[owner] < self._most
            ]
            if not ready:
                return
            owner = min(ready)[-1]
            turn = self._pop(owner, 0)
            if not turn.done():
                self._free -= 1
                self._begun[owner] += 1
                turn.set_result(None)

    def _pop(self, owner: str, place: int) -> asyncio.Future[None]:
        mine = self._waiting[owner]
        turn = mine.pop(place)[1]
        if not mine:
            del self._waiting[owner]
        return turn

    def close(self, error: HeadraceError) -> None:
        """Refuse all waiting jobs."""
        waiting, self._waiting = self._waiting, {}
        for mine in waiting.values():
            for _, turn in mine:
                if not turn.done():
                    turn.set_exception(error)


class ProgramJobs:
    """The jobs of one engine."""

    def __init__(
        self, executor: ProgramExecutor, on_end: Callable[[str, str, float], None]
    ) -> None:
        """`on_end` is called with a job's name, its outcome (`done`, `left`, or the code of an
        error), and its seconds."""
        self._executor, self._on_end = executor, on_end
        # One for each class: a batch job that waits for a lane does not block interactive ones.
        self._turns = [JobTurns(executor.lanes.count + 2) for _ in CLASSES]
        self._prepared = [JobTurns(executor.lanes.count + 2) for _ in CLASSES]
        self._loop = asyncio.get_running_loop()

    @asynccontextmanager
    async def begun(
        self,
        name: str,
        *,
        urgency: int = INTERACTIVE,
        timeout: float = math.inf,
        owner: str = "",
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> AsyncIterator[ProgramJob]:
        """Yield a job when its turn has come. `timeout`: seconds from now to its deadline;
        `prepare`: work before its turn, which blocks no other job. Raises `Overloaded`,
        `DeadlineMissed`, `ShuttingDown`, and the errors of `prepare`."""
        now, outcome = self._loop.time(), "done"
        job: ProgramJob | None = None
        work = TimedWork(self._executor.number(), now, urgency, now + timeout)
        turns = self._turns[urgency]
        with self._executor.place(owner):
            try:
                async with self._in_time(work):
                    async with self._ready(work, owner, prepare):
                        await turns.take(work, owner)
                    job = ProgramJob(name, self._executor, work, turns, owner)
                    yield job
            except HeadraceError as error:
                outcome = error.code or error.type
                raise
            except BaseException as error:
                outcome = "left" if isinstance(error, asyncio.CancelledError) else "fault"
                raise
            finally:
                if job is not None and job.begun:
                    turns.give(owner)
                self._on_end(name, outcome, self._loop.time() - now)

    @asynccontextmanager
    async def _ready(
        self, work: TimedWork, owner: str, prepare: Callable[[], Awaitable[None]] | None
    ) -> AsyncIterator[None]:
        """Prepare a job. The number of prepared jobs is bounded, because they hold memory."""
        if prepare is None:
            yield
            return
        prepared = self._prepared[work.urgency]
        await prepared.take(work, owner)
        try:
            await prepare()
            yield
        finally:
            prepared.give(owner)

    @asynccontextmanager
    async def _in_time(self, work: TimedWork) -> AsyncIterator[None]:
        """End a job at its deadline, even while it waits and between its runs. Raises
        `DeadlineMissed`."""
        clock = asyncio.timeout_at(None if work.deadline == math.inf else work.deadline)
        try:
            async with clock:
                yield
        except TimeoutError:
            if not clock.expired():
                raise
            took = (self._loop.time() - work.arrival) * 1e3
            raise DeadlineMissed(f"ended at its deadline, after {took:.1f} ms") from None

    def close(self) -> None:
        """Refuse the jobs that have not started."""
        for turns in (*self._turns, *self._prepared):
            turns.close(ShuttingDown("the server is shutting down", retry_after=2.0))
