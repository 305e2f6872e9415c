"""The scheduler: which work computes how many of its units in the next step.

There is no prefill phase and no decode phase. Work has units that are known and units that are
scheduled. A step computes `(start, count)` of each entry. Work that reaches its last known unit
gets its next result: a token, a vector, an end. Only its kind knows what the units are.

**Order of side effects in `schedule`** (nothing is undone later in the call):

1. *yield*: under "priority", waiting work may have preempted less urgent work;
2. *room*: running work that lacks blocks for its next unit asks for them in order of rank, and
   preempts from the end of that order. So work with room by now never loses it again;
3. *place*: decodes first, one unit each; then chunks of known units, by rank, as the budget
   lasts; with pipeline stages only a part at a time (`chunks`);
4. *admit*: waiting work by rank, while rows, budget and blocks last;
5. *draft*: decodes verify drafts that pay, in the rest of the budget and in free blocks.

**Nothing starves.** At most `Limits.running` run, so few that each can decode in every step and a
prompt always gets a part of the budget. Work that finds no blocks waits in place while work before
it in rank may preempt it. The first in rank preempts all others if it must, and `add` refused work
that does not fit alone. Preempted work keeps its rank and all that is known. If the decodes of a
step leave no budget for an atom, nothing of lower rank goes before it. Decodes end, and then it
fits, since `add` refused what exceeds a whole step.

**Steps in flight.** `update` takes results in the order of the plans. Work that finishes, is
aborted or preempted while steps with it are in flight keeps its row and blocks until they are done
(it is *leaving*). With `depth` 2 a plan may contain work that the previous result shows to be
finished: its results are dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from headrace.base.environment import check_plans
from headrace.base.errors import InvalidRequest, Overloaded
from headrace.base.request import FinishReason, Request, SequenceDelta, StepStats
from headrace.base.split import SplitStats
from headrace.base.step import BlockWrite, StepPlan, StepResult
from headrace.kv import KvManager

from .admission import RetryEstimate, verify_atoms, verify_request, work_of
from .chunks import EqualChunks
from .encodings import Encodings
from .flight import Flight, check
from .limits import Limits, StepRoom
from .price import DraftCounts, StepPrices, computed, draft_lengths
from .resource import Resource
from .roster import RESERVE, Roster
from .work import State, Work

LOOK_AHEAD = 32
"""Most work without its resources that an admission looks past, to find some that has them."""


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        kv: KvManager,
        resources: Iterable[Resource] = (),
        clock: Callable[[], float] = time.monotonic,
        prices: StepPrices | None = None,
        encodings: Encodings | None = None,
    ) -> None:
        """`prices`: used to choose drafts; None: every draft that is ready is verified.
        `encodings`: of inputs that are not text; None: the model has no encoder part."""
        self.prices, self._drafts = prices, DraftCounts()
        self.limits, self.kv = limits, kv
        self.resources = tuple(resources)
        self.max_context = min(limits.max_context, kv.capacity if kv.groups else limits.unkept)
        """Units of the longest work: the option, or what the pool can hold."""
        self._clock = clock
        self._requests: dict[str, list[Work]] = {}
        """Live work of each request."""
        self._encodings = encodings
        self._roster = Roster(limits, kv, self.resources, encodings)
        self.room = StepRoom.of(limits, keeps=bool(kv.groups))
        self._flights: deque[Flight] = deque()
        self._step = 0
        self._order = 0
        self._retry = RetryEstimate()
        self._last = 0, 0, 0, 0, 0
        """The latest step's number, entries, units, units of prompts, and new tokens."""
        self._held: tuple[float, int] | None = None
        """Rank of the atom for which the decodes of this step left no budget."""
        self._chunks = EqualChunks(limits)
        self._check = check_plans()
        self.split: SplitStats | None = None
        """Counts of the prefill/decode split, if the engine has a role in one."""

    # Queries of the engine

    @property
    def running(self) -> int:
        return self._roster.running

    @property
    def waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def pressure(self) -> tuple[int, int]:
        """Sequences that decode, and tokens of admitted prompts that are still to be computed."""
        return self._roster.pressure

    @property
    def in_flight(self) -> int:
        """Plans whose results are not there."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Whether a request still lacks its answer, or a result is still to come."""
        return bool(self._requests or self._flights)

    def requests(self) -> Iterator[Request]:
        """Yield all requests that have not ended."""
        return (works[0].request for works in self._requests.values())

    def stats(self) -> StepStats:
        """Return the counts after the latest update; the engine's loop fills in the times."""
        step, entries, tokens, prefill_tokens, sampled_tokens = self._last
        kv, roster = self.kv, self._roster
        # By position: this is made in every step.
        return StepStats(
            step,
            roster.running,
            len(roster.waiting),
            entries,
            tokens,
            prefill_tokens,
            sampled_tokens,
            kv.usage,
            kv.prefix_queries,
            kv.prefix_hits,
            roster.preemptions,
            *self._drafts.totals,
            tier=None if kv.tiers is None else kv.tiers.stats,
            encodings=None if self._encodings is None else self._encodings.stats(),
            split=self.split,
        )

    # Requests come and go

    def add(self, request: Request) -> None:
        """Take a request, or raise and take nothing.

        Raises `InvalidRequest` if it is wrong or its id is in use, `ContextOverflow` if it can
        never fit, and `Overloaded` if too many wait; `retry_after` says when to come again.
        """
        if request.id in self._requests:
            raise InvalidRequest(f"a request with id {request.id!r} is running", param="request_id")
        verify_request(request)
        self.enter(
            work_of(
                request,
                order=self._order,
                now=self._clock(),
                limits=self.limits,
                max_context=self.max_context,
                kv=self.kv,
            )
        )

    def enter(self, works: list[Work]) -> None:
        """Take the work of one request. Raises as `add`."""
        request, n = works[0].request, len(works)
        for resource in self.resources:
            resource.verify(request)
        if self._encodings is not None:
            self._encodings.verify(request)
        limits = self.limits
        verify_atoms(works, limits.step_tokens)
        room = limits.max_waiting + max(0, limits.running - self.running) - self.waiting
        if n > room:
            raise Overloaded(
                f"{self.waiting} sequences wait and {self.running} run; this request has {n}",
                retry_after=self._retry.seconds(self._clock(), self.waiting + n),
            )
        self._order += n
        self._requests[request.id] = works
        for work in works:
            self._roster.waiting.push(work)

    def abort(self, request_id: str) -> list[SequenceDelta]:
        """End all choices of a request in any state; return [] if it is not known."""
        works = list(self._requests.get(request_id, ()))
        return [self._finish(s, "abort") for s in works if s.state is not State.FINISHED]

    def abort_choice(self, request_id: str, choice: int) -> list[SequenceDelta]:
        """End one choice whose text has a stop string; return [] if it has ended."""
        found = [s for s in self._requests.get(request_id, ()) if s.choice == choice]
        return [self._finish(s, "stop") for s in found]

    def reset(self) -> None:
        """Forget the prefix index, and encodings that nobody reads."""
        self.kv.reset()
        if self._encodings is not None:
            self._encodings.reset()

    # The step

    def schedule(self) -> StepPlan | None:
        """Make the next plan; None if nothing can run now, or `depth` plans are in flight."""
        self.kv.turn()
        if len(self._flights) >= self.limits.depth or not self._requests:
            return None
        plan = StepPlan(self._step, [], [], [], [], blocks=self._roster.carried)
        plan.draft_costs = self._drafts.costs
        if self.limits.policy == "priority":
            self._roster.give_way()
        room = self._chunks.room(self._roster.uncomputed(LOOK_AHEAD))
        encodings = self._encodings
        if encodings is not None and encodings.paced(self._roster.prefilling.values()):
            room = min(room, encodings.tokens(len(self._roster.decoding)))
        chunks = self._find_room(plan.blocks, room)
        entries = self._place_decodes(plan)
        decodes = len(entries)
        for work, count in chunks:
            self._place(plan, entries, work, count)
            room -= count
        if len(self._roster.waiting):
            self._admit(plan, entries, room, alone=not chunks)
        if self.limits.drafts:
            self._draft(plan, entries[:decodes])
        encoded = None if encodings is None else encodings.plan(plan, entries[:decodes], self.room)
        if not plan.rows:
            return None
        if (slots := self.kv.slots) is not None and slots.free:
            for work in entries:
                if work.table is not None and work.request.spec.generates:
                    slots.take(work.table, work.row, work.known, plan.slots)
        self._roster.carried = []
        plan.released.extend(self._roster.rows.take_released())
        if encodings is not None:
            plan.dropped += encodings.take_dropped()
        if self._check:
            plan.verify(budget=self.limits.step_tokens, rows=self.limits.rows)
        self._flights.append(Flight(plan, entries, decodes, encoded))
        self._step += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Book the result of the oldest plan in flight; return the deltas of its entries."""
        return cast("list[SequenceDelta]", self.book(plan, result, bare=False))

    def book(self, plan: StepPlan, result: StepResult, *, bare: bool) -> list[SequenceDelta | Work]:
        """Book the result of the oldest plan in flight; return the deltas of its entries.

        `bare`: a decode that gained one token, and nothing else, stands for its delta.
        """
        if result.error is not None:
            return [*self.fail(plan, result.error)]
        flight = self._land(plan)
        assert len(result.tokens) == len(plan.rows), "the result is not of this plan"
        self.kv.settle(plan.number)
        number, decodes = plan.number, flight.decodes
        _learn(self._drafts, self.prices, plan, result, decodes)
        running, finished = State.RUNNING, State.FINISHED
        deltas: list[SequenceDelta | Work] = []
        delta: SequenceDelta | None
        sampled = 0
        single = decodes if bare and result.plain else 0
        starts, counts, new = plan.starts, plan.counts, result.tokens
        for i, work in enumerate(flight.entries):
            work.in_flight -= 1
            work.chunk_start = starts[i] + counts[i]
            if number > work.void_until and work.state is not finished:
                if i < single and work.goes_on(new[i]):
                    deltas.append(work)
                    sampled, delta = sampled + 1, None
                elif i in result.failures:
                    delta = work.fault(result.failures[i])
                elif i in result.spoiled:
                    delta = work.end("error", result.spoiled[i])
                else:
                    delta = work.take(plan, result, i, grows=i < decodes)
                if delta is not None:
                    deltas.append(delta)
                    sampled += len(delta.tokens)
                    if delta.finish is not None:
                        self._leave(work)
                elif work.joint and plan.samples[i]:
                    self._pass_on(work)
            if work.state is not running:
                self._roster.drain(work)
        if self._encodings is not None:
            for work, why in self._encodings.land(plan, result, flight.encoded):
                deltas.append(self._finish(work, "error", why))
        self._last = flight.counts(sampled)
        return deltas

    def fail(self, plan: StepPlan, message: str, *, again: bool = False) -> list[SequenceDelta]:
        """End the entries of the oldest plan in flight, which failed, or begin them `again`.

        Later plans may have read what it should have written: work only in those begins again.
        """
        flight = self._land(plan)
        self.kv.forget(plan.number)
        begun = {work.id for work in flight.entries if plan.number <= work.void_until}
        for later in self._flights:
            for work in later.entries:
                if work.table is not None:
                    self.kv.distrust(work.table)
                work.void_until = later.plan.number
        deltas = []
        for work in flight.entries:
            work.in_flight -= 1
            if work.table is not None:
                self.kv.distrust(work.table)
            live = work.id not in begun and work.state is not State.FINISHED
            if live and not again:
                deltas.append(self._finish(work, "error", message))
            elif live and work.state is State.RUNNING:
                self._roster.preempt(work)
        if self._encodings is not None and flight.encoded is not None:
            for work in self._encodings.failed(flight.encoded, alone=False, again=again):
                if work.state is not State.FINISHED:
                    deltas.append(self._finish(work, "error", message))
        for later in self._flights:
            for work in later.entries:
                if work.state is State.RUNNING:
                    self._roster.preempt(work)
        for work in flight.entries:
            self._roster.drain(work)
        self._last = flight.counts(0)
        return deltas

    # The phases of `schedule`

    def _find_room(self, writes: list[BlockWrite], room: int) -> list[tuple[Work, int]]:
        """Find blocks for running work; return the chunks, `room` at most, that have them."""
        decoding, prefilling = self._roster.decoding, self._roster.prefilling
        needy = [s for s in decoding.values() if s.scheduled >= s.capacity < s.limit]
        if self.limits.stages > 1:
            needy = [s for s in needy if not s.in_flight]
        needy.extend(prefilling.values())
        budget = min(room, self.room.now - len(decoding))
        most = self.room.units - len(decoding)
        self._held = None
        latest = self._step - 1 if self._flights else None
        needy.sort(key=lambda s: s.rank)
        tiers = self.kv.tiers
        chunks = []
        for work in needy:
            if work.state is not State.RUNNING:
                continue  # preempted by work before it
            start = work.scheduled
            if work.id in decoding:
                if self._roster.make_room(work, start + 1, writes):
                    assert work.table is not None
                    self.kv.enter(work.table, min(start, work.known), latest)
            elif budget > 0:
                if tiers is not None and tiers.meets(work.id, start):
                    self._roster.leave(work, State.PREEMPTED)
                    continue
                if start >= work.ready:
                    continue
                count = work.chunk(start, budget, most)
                if not count:
                    self._held, budget = work.rank, 0
                elif work.table is None or self._roster.make_room(work, start + count, writes):
                    count = work.chunk(start, min(count, work.capacity - start))
                    chunks.append((work, count))
                    budget, most = budget - count, 0
        return chunks

    def _place_decodes(self, plan: StepPlan) -> list[Work]:
        decoding = self._roster.decoding
        ready = [s for s in decoding.values() if s.scheduled < s.capacity]
        if self.limits.stages > 1:  # Each of the steps in flight decodes as many.
            share = -(-len(decoding) // self.limits.stages)
            ready = [s for s in ready if not s.in_flight][:share]
            for s in ready:  # Work that is left over is the first of the next step.
                decoding[s.id] = decoding.pop(s.id)
        plan.rows.extend([s.row for s in ready])
        plan.starts.extend([s.scheduled for s in ready])
        plan.counts.extend([1] * len(ready))
        for s in ready:
            s.scheduled += 1
            s.in_flight += 1
        plan.samples.extend([True] * len(ready))
        return ready

    def _place(self, plan: StepPlan, entries: list[Work], work: Work, count: int) -> None:
        """Place a chunk of known units; after the last one the work decodes."""
        start, known = work.scheduled, work.known
        end = start + count
        plan.rows.append(work.row)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.samples.append(end == known)
        entries.append(work)
        work.chunk_start = work.chunk_start if work.in_flight else start
        work.scheduled = end
        work.in_flight += 1
        if end == known:
            del self._roster.prefilling[work.id]
            self._roster.decoding[work.id] = work
        if work.table is not None:
            self.kv.enter(work.table, end, plan.number)
            self.kv.keep(work.table, work.row, start, plan)

    def _admit(self, plan: StepPlan, entries: list[Work], room: int, *, alone: bool) -> None:
        """Give rows to waiting work by rank; place its first chunks. `alone`: no others are."""
        roster = self._roster
        budget = min(room, self.room.now - plan.tokens)
        now = self._clock()
        unprepared: list[Work] = []
        while budget > 0 and not roster.full and len(unprepared) < LOOK_AHEAD:
            work = roster.waiting.peek()
            if work is None or roster.still_blocked(work):
                break
            atom = min(work.atom, work.known)
            if self.room.shared is not None and not plan.rows:
                budget = max(budget, min(atom, self.room.units))  # It has a step for itself.
            if atom > budget or (self._held and work.rank > self._held):
                break
            prepared = roster.prepare(work)
            most = self.room.units - plan.tokens if alone and not plan.admitted else 0
            count = roster.enter(work, budget, most) if prepared else 0
            if count < 0 or (prepared and roster.blocked is work):
                break
            if not count:  # It lacks a resource, or its first tokens an encoding.
                unprepared.append(roster.waiting.pop())
                continue
            if not work.preemptions:
                work.scheduled_at = now
            plan.admitted.append(work.admission())
            if work.table is not None:
                self.kv.writes(work.table, work.row, plan)
            self._place(plan, entries, work, count)
            budget -= count
        for work in unprepared:
            roster.waiting.push(work)

    def _draft(self, plan: StepPlan, decodes: list[Work]) -> None:
        """Let decodes verify drafts, last: no prompt waits, and no work gives up a block."""
        tokens, most = plan.tokens, self.limits.drafts
        room = self.room.units - tokens
        ready = [work.drafts[: min(most, work.limit - work.scheduled)] for work in decodes]
        if room <= 0 or not any(ready):
            return
        each = self._drafts.making
        making = [each if work.promised else 0.0 for work in decodes]
        for entry, count in enumerate(draft_lengths(ready, tokens, room, self.prices, making)):
            work = decodes[entry]
            if not count:
                continue
            end, table = work.scheduled + count, work.table
            assert table is not None
            if end > work.capacity and self.kv.has_room(end, count, work.capacity, RESERVE):
                held = self.kv.grow(table, work.row, work.oldest_query(), end, plan.blocks)
                work.capacity = min(held, work.limit)
            count = min(count, work.capacity - work.scheduled)
            plan.counts[entry] += count
            plan.drafts += count
            work.scheduled += count

    # Books

    def _land(self, plan: StepPlan) -> Flight:
        assert self._flights, "no plan is in flight"
        assert self._flights[0].plan.number == plan.number, "results come in the order of plans"
        return self._flights.popleft()

    def _finish(self, work: Work, finish: FinishReason, error: str | None = None) -> SequenceDelta:
        """End work in any state from outside its own results."""
        self._leave(work)
        return work.end(finish, error)

    def _leave(self, work: Work) -> None:
        """Remove work that has its answer from its request, and what is joint with it."""
        works = self._requests[work.request.id]
        for one in works[:] if work.joint else (work,):
            self._roster.leave(one, State.FINISHED)
            works.remove(one)
            if self._encodings is not None:
                self._encodings.leave(one)
        if not works:
            del self._requests[work.request.id]
        self._retry.finished(self._clock())

    def _pass_on(self, work: Work) -> None:
        """Put further work for the same answer in the place of joint work that ended."""
        works = self._requests[work.request.id]
        self._roster.leave(work, State.FINISHED)
        works.remove(work)
        made = work.further(self._order)
        self._order += len(made)
        works += made
        for one in made:
            self._roster.waiting.push(one)

    def check_integrity(self) -> None:
        """Assert the invariants between any two calls; when idle, that nothing is held."""
        live = [work for works in self._requests.values() for work in works]
        check(live, self._flights, self._roster, self._encodings)


def _learn(
    drafts: DraftCounts,
    prices: StepPrices | None,
    plan: StepPlan,
    result: StepResult,
    decodes: int,
) -> None:
    """Learn from a step what drafts and decodes cost."""
    only, drafting = decodes == len(plan.rows), 0.0
    if result.drafting is not None:
        drafting = result.drafting.seconds
        drafts.learn(result.drafting, result.seconds, decodes=only)
    if prices is not None and only:
        prices.observe(computed(plan, result), result.seconds - drafting)
    if result.verified:
        drafts.note(computed(plan, result), decodes, result.verified, prices, drafting)
