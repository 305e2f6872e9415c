"""The running and the waiting work, and what the running holds: rows, blocks, resources.

Work is in one of these places:

    waiting        in the queue: WAITING, or PREEMPTED with nothing held
    prefilling     RUNNING, with known units that no step has been planned for
    decoding       RUNNING, all known units are in some step: each further step computes one
                   that the step before it made, or no unit is left
    leaving        FINISHED or PREEMPTED, but in a step in flight: holds everything until its end

`enter` moves from the first to the second, `leave` out of the second and third. The scheduler moves
work from the second to the third, when it plans the last chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from headrace.base.step import BlockWrite
from headrace.kv import KvManager, lent_of

from .encodings import Encodings
from .limits import Limits
from .queue import WaitingQueue
from .resource import Resource, all_prepared
from .rows import Rows
from .work import ALL, NO_ROW, State, Work

RESERVE = 0.02
"""Share of the blocks that an admission leaves to running work, so that it can grow."""


class Roster:
    """The places of work, and every way to take and give back what running work holds."""

    def __init__(
        self,
        limits: Limits,
        kv: KvManager,
        resources: tuple[Resource, ...],
        encodings: Encodings | None = None,
    ) -> None:
        self.kv = kv
        self._encodings = encodings
        self.resources = resources
        self.waiting = WaitingQueue()
        self.decoding: dict[int, Work] = {}
        self.prefilling: dict[int, Work] = {}
        self.leaving = 0
        self.rows = Rows(limits.rows)
        self.preemptions = 0
        """Since the start."""
        self.carried: list[BlockWrite] = []
        """Deltas of the plan being made. Blocks before a window are given back even if no plan
        results; then the next plan reports them."""
        self.blocked: Work | None = None
        """The head of the queue, if it found no blocks when it was tried last."""
        self._blocked_free = 0
        """Blocks that were free then: `blocked` is tried again once there are more."""
        self._vain: Work | None = None
        """The work for which others gave way last, until it runs."""
        self._most = limits.running

    @property
    def running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def full(self) -> bool:
        """Whether work must leave before other work can run."""
        return not self.rows.free or self.running >= self._most

    @property
    def pressure(self) -> tuple[int, int]:
        """(work that decodes, units of prompts that no step has been planned for)."""
        left = sum(work.known - work.scheduled for work in self.prefilling.values())
        return len(self.decoding), left

    def uncomputed(self, most: int) -> Iterator[Work]:
        """Yield work with units that no step was planned for: all that runs, and at most `most`
        that waits."""
        yield from self.prefilling.values()
        if not self.full:
            yield from self.waiting.first(min(most, self._most - self.running))

    def all_running(self) -> Iterator[Work]:
        return chain(self.decoding.values(), self.prefilling.values())

    def last_in_rank(self, *, keeps: bool = False) -> Work:
        """Return the running work that is preempted first: the latest, or least urgent. `keeps`:
        only among work that holds blocks."""
        return max((s for s in self.all_running() if s.keeps or not keeps), key=lambda s: s.rank)

    # In

    def still_blocked(self, work: Work) -> bool:
        """Return whether trying to admit it would fail as it did before."""
        return work is self.blocked and self.running > 0 and self.kv.free <= self._blocked_free

    def prepare(self, work: Work) -> bool:
        """Take the resources that it needs to run, all or none. Its encodings have room until it
        ends."""
        room = self._encodings is None or self._encodings.reserve(work)
        return room and all_prepared(self.resources, work)

    def enter(self, work: Work, budget: int, most: int) -> int:
        """Take the (prepared) head of the queue into a row, with its hits of the prefix index.

        Returns the units of its first chunk, at most `budget`, or `most` as `Work.chunk` has it.
        Without enough blocks, or while the first unit waits for an encoding, it returns 0, takes
        nothing and gives the resources back; so it does if the budget is too small, and returns -1.
        """
        known = work.known
        if work.keeps:
            start, count = self._open(work, known, budget, most)
        else:
            self._need(work, 0)
            start, count = 0, work.chunk(0, budget)
            work.capacity = work.limit
        if count <= 0:
            for resource in self.resources:
                resource.free(work)
            lacks = start < work.ready and not count
            self.blocked, self._blocked_free = work if lacks else None, self.kv.free
            return count
        if work.state is State.WAITING:
            work.cached = start
        self.blocked = None
        self._vain = None if self._vain is work else self._vain
        taken = self.waiting.pop()
        assert taken is work
        work.move(State.RUNNING)
        self.prefilling[work.id] = work
        work.row = self.rows.take()
        work.admitted = known
        work.drafts = b""
        work.chunk_start = work.scheduled = start
        return count

    def _need(self, work: Work, start: int) -> None:
        if self._encodings is not None and work.request.spec.inputs:
            self._encodings.need(work, start)

    def _open(self, work: Work, known: int, budget: int, most: int) -> tuple[int, int]:
        """Open a table with the hits of the index and blocks for a first chunk; return its (start,
        count). Count 0: there are too few blocks, -1: the budget is too small; nothing is taken."""
        kv, read = self.kv, work.reads
        table = kv.open(known, work.chain, read=read)
        start = kv.cached(table)
        self._need(work, start)
        count = work.chunk(start, budget, most)
        if not count and start < work.ready:
            kv.close(table)
            return start, -1
        alone = not self.running and not self.leaving
        room = start
        if alone or kv.has_room(known + 1, count, start, RESERVE if self.running else 0.0):
            room = kv.grow(table, NO_ROW, start, start + count, [])
        capacity = min(room, work.limit)
        count = work.chunk(start, min(count, capacity - start))
        if not count:
            kv.close(table)
            return start, 0
        work.capacity = capacity
        if read:
            kv.count_lookup(known, start)
        work.table = table
        return start, count

    def make_room(self, work: Work, end: int, writes: list[BlockWrite]) -> bool:
        """Take blocks up to `end` or as far as possible; return whether there is room for at least
        one unit, or for those that see each other."""
        table = work.table
        assert table is not None
        end = min(end, work.limit)
        while True:
            room = self.kv.grow(table, work.row, work.oldest_query(), end, writes)
            work.capacity = min(room, work.limit)
            if work.capacity >= work.scheduled + work.least(work.scheduled):
                return True
            if self.leaving:
                return False  # blocks are on their way already
            victim = self.last_in_rank(keeps=True)
            if victim is work:
                return False
            self.preempt(victim)

    # Out

    def preempt(self, work: Work) -> None:
        """Take row and blocks away; the work waits, with its rank and all that is known."""
        work.preemptions += 1
        self.preemptions += 1
        self.leave(work, State.PREEMPTED)

    def give_way(self) -> None:
        """Preempt one running work for a more urgent one that would have to wait. The first may
        free the resource that it lacks; the next one gives way if it lacks none."""
        head = self.waiting.peek()
        if head is None or self.leaving or not self.running:
            return
        if head.ready < ALL:
            return  # It waits for an encoding, and would not run.
        if self.full or self.blocked is head:
            victim = self.last_in_rank()
            if head.rank < victim.rank and head.request.priority < victim.request.priority:
                if self._vain is head and not self._lacks_nothing(head):
                    return
                self._vain = head
                self.preempt(victim)

    def _lacks_nothing(self, work: Work) -> bool:
        """Return whether `prepare` would say yes now."""
        prepared = self.prepare(work)
        for resource in self.resources if prepared else ():
            resource.free(work)
        return prepared

    def leave(self, work: Work, state: State) -> None:
        """Stop running or waiting; its holdings are given back once no step in flight uses them."""
        was_running = work.state is State.RUNNING
        work.move(state)
        if not was_running:
            self.waiting.discard(work)
            if self.kv.tiers is not None:
                self.kv.tiers.gone(work.id)
            return
        self.decoding.pop(work.id, None)
        self.prefilling.pop(work.id, None)
        if work.in_flight:
            self.leaving += 1
        else:
            self._give_back(work)

    def drain(self, work: Work) -> None:
        """After a result of a work that does not run, give back its holdings if it was the last
        awaited."""
        if work.in_flight == 0 and work.row != NO_ROW:
            self.leaving -= 1
            self._give_back(work)

    def _give_back(self, work: Work) -> None:
        """Return row, blocks and resources; preempted work waits from now on."""
        assert work.row != NO_ROW
        assert work.in_flight == 0
        table = work.table
        if table is not None:
            # No step is in flight, so all that is scheduled is computed.
            computed = min(work.scheduled, work.known)
            self.kv.enter(table, computed, step=None)
            self.kv.leave_rest(table, computed)
            self.kv.close(table)
            work.table = None
        if self.carried:  # In place: a plan that is being made holds the list.
            self.carried[:] = [write for write in self.carried if write.row != work.row]
        self.rows.give_back(work.row)
        work.row = NO_ROW
        for resource in self.resources:
            resource.free(work)
        if work.state is State.PREEMPTED:
            self.waiting.push(work)

    def check_integrity(self, flying: list[Work]) -> None:
        """Assert the places and the holdings; `flying`: the entries of all steps in flight."""
        running = list(self.all_running())
        assert all(s.state is State.RUNNING and s.row != NO_ROW for s in running)
        assert len(running) <= self._most
        assert len({s.id for s in flying if s.state is not State.RUNNING}) == self.leaving
        held = {s.row for s in running} | {s.row for s in flying}
        assert len(held) == len({s.id for s in running} | {s.id for s in flying})
        self.rows.check_integrity(held)
        self.kv.check_integrity()
        if not held:
            assert self.kv.usage == 0.0 or lent_of(self.kv), "blocks leak"
