"""Who runs and who waits, and what those who run hold: rows, blocks, resources.

A sequence is in one of these places:

    waiting        in the queue: WAITING, or PREEMPTED with nothing held
    prefilling     RUNNING, with known tokens that no step has been planned for
    decoding       RUNNING, all known tokens are in some step: each further step brings a new one
    leaving        FINISHED or PREEMPTED, but in a step in flight: holds everything until its end

`enter` moves from the first to the second, `leave` out of the second and third; the scheduler
itself moves between these two, when it plans the last chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from headrace.base.step import BlockWrite
from headrace.kv import KvManager

from .limits import Limits
from .queue import WaitingQueue
from .resource import Resource, all_prepared
from .rows import Rows
from .sequence import NO_ROW, Sequence, State

RESERVE = 0.02
"""Share of the blocks that an admission leaves to those who run, so that they can grow."""


class Roster:
    """The places, and every way to take and to give back what a running sequence holds."""

    def __init__(self, limits: Limits, kv: KvManager, resources: tuple[Resource, ...]) -> None:
        self.kv = kv
        self.resources = resources
        self.waiting = WaitingQueue()
        self.decoding: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self.leaving = 0
        self.rows = Rows(limits.rows)
        self.preemptions = 0
        """Since the start."""
        self.carried: list[BlockWrite] = []
        """Deltas of a plan that came to nothing, for the next one."""
        self.blocked: Sequence | None = None
        """The head of the queue, if it found no blocks when it was tried last …"""
        self._blocked_free = 0
        """… and how many were free then: with no more than these it is not tried again."""
        self._most = limits.running

    @property
    def running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def full(self) -> bool:
        """Must someone leave before another can run?"""
        return not self.rows.free or self.running >= self._most

    def all_running(self) -> Iterator[Sequence]:
        return chain(self.decoding.values(), self.prefilling.values())

    def last_in_rank(self) -> Sequence:
        """Who is preempted first: the latest, or least urgent, of those who run."""
        return max(self.all_running(), key=lambda s: s.rank)

    # In

    def still_blocked(self, sequence: Sequence) -> bool:
        """Would trying to admit it fail as it did before?"""
        return sequence is self.blocked and self.running > 0 and self.kv.free <= self._blocked_free

    def prepare(self, sequence: Sequence) -> bool:
        """The resources that it needs to run, all or none."""
        return all_prepared(self.resources, sequence)

    def enter(self, sequence: Sequence, budget: int) -> int:
        """Take the (prepared) head of the queue into a row, with what the prefix index has for it.

        Returns the tokens of its first chunk, at most `budget`. 0, and nothing taken and the
        resources given back, if there are no blocks.
        """
        kv, known = self.kv, len(sequence.tokens)
        read = sequence.chain is not None and not sequence.scores_prompt
        table = kv.open(sequence.tokens, sequence.chain, read=read)
        start = kv.cached(table)
        count = min(known - start, budget)
        alone = not self.running and not self.leaving
        room = start
        if alone or kv.has_room(known + 1, count, start, RESERVE if self.running else 0.0):
            room = kv.grow(table, NO_ROW, start, start + count, [])
        if room <= start:
            kv.close(table)
            for resource in self.resources:
                resource.free(sequence)
            self.blocked, self._blocked_free = sequence, kv.free
            return 0
        if read:
            kv.count_lookup(known, start)
        if sequence.state is State.WAITING:
            sequence.cached = start
        self.blocked = None
        taken = self.waiting.pop()
        assert taken is sequence
        sequence.move(State.RUNNING)
        self.prefilling[sequence.id] = sequence
        sequence.row = self.rows.take()
        sequence.table = table
        sequence.admitted = known
        sequence.chunk_start = sequence.scheduled = start
        sequence.capacity = min(room, sequence.limit - 1)
        return min(count, sequence.capacity - start)

    # Out

    def preempt(self, sequence: Sequence) -> None:
        """Take row and blocks away; the sequence waits, with its rank and all its tokens."""
        sequence.preemptions += 1
        self.preemptions += 1
        self.leave(sequence, State.PREEMPTED)

    def leave(self, sequence: Sequence, state: State) -> None:
        """Stop running or waiting; what is held is given back once no step in flight uses it."""
        was_running = sequence.state is State.RUNNING
        sequence.move(state)
        if not was_running:
            self.waiting.discard(sequence)
            return
        self.decoding.pop(sequence.id, None)
        self.prefilling.pop(sequence.id, None)
        if sequence.in_flight:
            self.leaving += 1
        else:
            self._give_back(sequence)

    def drain(self, sequence: Sequence) -> None:
        """After a result of a sequence that does not run: was it the last that it waited for?"""
        if sequence.in_flight == 0 and sequence.row != NO_ROW:
            self.leaving -= 1
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Row, blocks and resources return; who was preempted waits from now on."""
        assert sequence.row != NO_ROW
        assert sequence.in_flight == 0
        table = sequence.table
        if table is not None:
            # No step in flight: what is scheduled is computed, generated tokens included.
            computed = min(sequence.scheduled, len(sequence.tokens))
            self.kv.enter(table, sequence.tokens, computed, step=None)
            self.kv.close(table)
            sequence.table = None
        if self.carried:
            self.carried = [write for write in self.carried if write.row != sequence.row]
        self.rows.give_back(sequence.row)
        sequence.row = NO_ROW
        for resource in self.resources:
            resource.free(sequence)
        if sequence.state is State.PREEMPTED:
            self.waiting.push(sequence)

    def check_integrity(self, flying: list[Sequence]) -> None:
        """Assert the places and what is held; `flying`: the entries of all steps in flight."""
        running = list(self.all_running())
        assert all(s.state is State.RUNNING and s.row != NO_ROW for s in running)
        assert len(running) <= self._most
        assert len({s.id for s in flying if s.state is not State.RUNNING}) == self.leaving
        held = {s.row for s in running} | {s.row for s in flying}
        assert len(held) == len({s.id for s in running} | {s.id for s in flying})
        self.rows.check_integrity(held)
        self.kv.check_integrity()
        if not held:
            assert self.kv.usage == 0.0, "blocks leak"
