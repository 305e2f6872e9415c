"""The scheduler: which sequence computes how many tokens in the next step.

There is no prefill phase and no decode phase. A sequence has tokens that are known and tokens
that are scheduled; a step computes `(start, count)` of each entry, and whoever reaches its last
known token gets a new one.

**Order of side effects in `schedule`** (nothing is undone later in the call):

1. *yield*: under "priority", a waiting sequence may have preempted a less urgent one;
2. *room*: whoever runs and lacks blocks for its next token asks for them in order of rank, and
   preempts from the end of that order, so that nobody who has room by now loses it again;
3. *place*: decodes first, one token each; then chunks of prompts, by rank, as the budget lasts;
4. *admit*: waiting sequences by rank, while rows, budget and blocks last.

**Nobody starves.** At most `Limits.running` sequences run, so few that each can decode in every
step and a prompt always gets a part of the budget. Who finds no blocks waits in place while
those before it in rank may preempt it; the first in rank preempts all others if it must, and
`add` refused whoever does not fit alone. A preempted sequence keeps its rank and its tokens.

**Steps in flight.** `update` takes results in the order of the plans. A sequence that finishes,
is aborted or preempted while steps with it are in flight keeps its row and blocks until they
are done (it is *leaving*). With `depth` 2 a plan may contain a sequence of which the result
before it shows that it was finished: what it gets is dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from headrace.base.environment import check_plans
from headrace.base.errors import InvalidRequest, Overloaded
from headrace.base.request import FinishReason, Request, SequenceDelta, StepStats
from headrace.base.step import BlockWrite, StepPlan, StepResult
from headrace.kv import KvManager

from .admission import RetryEstimate, sequences_of
from .answers import accept, end, score
from .limits import Limits
from .resource import Resource
from .roster import Roster
from .sequence import NO_ROW, Sequence, State

LOOK_AHEAD = 32
"""Sequences without their resources that an admission looks past, to find one that has them."""


@dataclass(slots=True)
class Flight:
    """A plan whose result is not there, and who is in it."""

    plan: StepPlan
    entries: list[Sequence]
    decodes: int
    """The first entries: one token, and drafts, each."""


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        kv: KvManager,
        resources: Iterable[Resource] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.resources = tuple(resources)
        self.max_context = min(limits.max_context, kv.capacity)
        if limits.whole:
            self.max_context = min(self.max_context, limits.step_tokens)
        """Tokens of the longest sequence: the option's, or what the pool can hold."""
        self._clock = clock
        self._requests: dict[str, list[Sequence]] = {}
        """Live sequences of each request."""
        self._roster = Roster(limits, kv, self.resources)
        self._flights: deque[Flight] = deque()
        self._step = 0
        self._order = 0
        self._retry = RetryEstimate()
        self._last = 0, 0, 0, 0, 0
        """Of the latest step: its number, entries, tokens, those of prompts, and new ones."""
        self._check = check_plans()

    # What the engine asks

    @property
    def running(self) -> int:
        return self._roster.running

    @property
    def waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def in_flight(self) -> int:
        """Plans whose results are not there."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Is there anyone who still has to get an answer, or a result to come?"""
        return bool(self._requests or self._flights)

    def requests(self) -> Iterator[Request]:
        """All that have not ended."""
        return (sequences[0].request for sequences in self._requests.values())

    def stats(self) -> StepStats:
        """Counts after the latest update; the engine's loop fills in the times."""
        step, entries, tokens, prefill_tokens, sampled_tokens = self._last
        kv, roster = self.kv, self._roster
        # By position: this is made in every step.
        return StepStats(
            step, roster.running, len(roster.waiting), entries, tokens, prefill_tokens,
            sampled_tokens, kv.usage, kv.prefix_queries, kv.prefix_hits, roster.preemptions,
        )  # fmt: skip

    # Requests come and go

    def add(self, request: Request) -> None:
        """Take a request, or raise and take nothing.

        `InvalidRequest`: it is wrong, or its id is in use. `ContextOverflow`: it can never fit.
        `Overloaded`: too many wait; `retry_after` says when to come again.
        """
        now = self._clock()
        n = request.spec.sampling.n
        limits = self.limits
        room = limits.max_waiting + max(0, limits.running - self.running) - self.waiting
        sequences = sequences_of(
            request,
            taken=request.id in self._requests,
            order=self._order,
            now=now,
            policy=limits.policy,
            max_context=self.max_context,
            kv=self.kv,
        )
        for resource in self.resources:
            resource.verify(request)
        if n > room:
            raise Overloaded(
                f"{self.waiting} sequences wait and {self.running} run; this request has {n}",
                retry_after=self._retry.seconds(now, self.waiting + n),
            )
        self._order += n
        self._requests[request.id] = sequences
        for sequence in sequences:
            self._roster.waiting.push(sequence)

    def abort(self, request_id: str, *, finish: FinishReason = "abort") -> list[SequenceDelta]:
        """End all choices of a request, whatever their state; [] if it is not known."""
        return [self._finish(s, finish) for s in list(self._requests.get(request_id, ()))]

    def abort_choice(
        self, request_id: str, choice: int, *, finish: FinishReason = "stop"
    ) -> list[SequenceDelta]:
        """End one choice: a stop string was seen in its text. [] if it has ended."""
        found = [s for s in self._requests.get(request_id, ()) if s.choice == choice]
        return [self._finish(s, finish) for s in found]

    # The step

    def schedule(self) -> StepPlan | None:
        """The next plan; None if nothing can run now, or `depth` plans are in flight."""
        if len(self._flights) >= self.limits.depth or not self._requests:
            return None
        plan = StepPlan(self._step, [], [], [], [], blocks=self._roster.carried)
        self._roster.carried = []
        if self.limits.policy == "priority":
            self._yield()
        chunks = self._find_room(plan.blocks)
        entries = self._place_decodes(plan)
        decodes = len(entries)
        for sequence, count in chunks:
            self._place(plan, entries, sequence, count)
        if len(self._roster.waiting):
            self._admit(plan, entries)
        if not entries:
            # Blocks behind a window may have been given back all the same.
            self._roster.carried = plan.blocks
            return None
        plan.released.extend(self._roster.rows.take_released())
        if self._check:
            plan.verify(budget=self.limits.step_tokens, rows=self.limits.rows)
        self._flights.append(Flight(plan, entries, decodes))
        self._step += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        """Book the result of the oldest plan in flight; the news of its sequences."""
        if result.error is not None:
            return self.fail(plan, result.error)
        flight = self._land(plan)
        assert len(result.tokens) == len(flight.entries), "the result is not of this plan"
        self.kv.settle(plan.number)
        number, counts, decodes = plan.number, plan.counts, flight.decodes
        logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
        outputs = result.outputs
        running, finished = State.RUNNING, State.FINISHED
        deltas: list[SequenceDelta] = []
        failures = result.failures
        sampled = 0
        for i, (sequence, new) in enumerate(zip(flight.entries, result.tokens, strict=True)):
            sequence.in_flight -= 1
            if number > sequence.void_until and sequence.state is not finished:
                delta = None
                if i in failures:
                    delta = end(sequence, "error", failures[i])
                    delta.error_status = InvalidRequest.status
                elif i < decodes:
                    # Drafts that were not accepted are not computed after all.
                    sequence.scheduled -= counts[i] - len(new)
                elif prompt_logprobs is not None and sequence.scores_prompt:
                    delta = score(sequence, plan.starts[i], prompt_logprobs[i])
                if new:
                    scores = None if logprobs is None else logprobs[i]
                    delta = accept(sequence, new, scores, delta)
                    sampled += len(delta.tokens)
                    for resource in self.resources:
                        resource.update(sequence, len(delta.tokens))
                elif outputs is not None and i in outputs:
                    delta = end(sequence, "stop")
                    delta.output = outputs[i]
                if delta is not None:
                    deltas.append(delta)
                    if delta.finish is not None:
                        self._leave(sequence)
            if sequence.state is not running:
                self._roster.drain(sequence)
        self._note(flight, sampled)
        return deltas

    def fail(self, plan: StepPlan, message: str) -> list[SequenceDelta]:
        """The oldest plan in flight failed: its sequences end with an error.

        Later plans in flight may have read what this one should have written, so their results
        will be dropped; sequences that are only in those start again.
        """
        flight = self._land(plan)
        self.kv.forget(plan.number)
        for later in self._flights:
            for sequence in later.entries:
                if sequence.table is not None:
                    self.kv.distrust(sequence.table)
                sequence.void_until = later.plan.number
        deltas = []
        for sequence in flight.entries:
            sequence.in_flight -= 1
            if sequence.table is not None:
                self.kv.distrust(sequence.table)
            if sequence.state is not State.FINISHED:
                deltas.append(self._finish(sequence, "error", message))
        for later in self._flights:
            for sequence in later.entries:
                if sequence.state is State.RUNNING:
                    self._roster.preempt(sequence)
        for sequence in flight.entries:
            self._roster.drain(sequence)
        self._note(flight, 0)
        return deltas

    # The stages of `schedule`

    def _yield(self) -> None:
        """Preempt one running sequence for a more urgent one that would have to wait."""
        roster = self._roster
        head = roster.waiting.peek()
        if head is None or roster.leaving or not roster.running:
            return
        if roster.full or roster.blocked is head:
            victim = roster.last_in_rank()
            if head.rank < victim.rank and head.request.priority < victim.request.priority:
                roster.preempt(victim)

    def _find_room(self, writes: list[BlockWrite]) -> list[tuple[Sequence, int]]:
        """Blocks for those who run and need some; the chunks of prompts that then have room."""
        most = 1 + self.limits.drafts
        decoding, prefilling = self._roster.decoding, self._roster.prefilling
        needy = [s for s in decoding.values() if s.scheduled + most > s.capacity < s.limit - 1]
        needy.extend(prefilling.values())
        budget = self.limits.step_tokens - len(decoding) * most
        latest = self._step - 1 if self._flights else None
        needy.sort(key=lambda s: s.rank)
        chunks = []
        for sequence in needy:
            if sequence.state is not State.RUNNING:
                continue  # preempted by one before it
            start = sequence.scheduled
            if sequence.id in decoding:
                if self._make_room(sequence, start + most, writes):
                    assert sequence.table is not None
                    known = min(start, len(sequence.tokens))
                    self.kv.enter(sequence.table, sequence.tokens, known, latest)
            elif budget > 0:
                wish = start + min(len(sequence.tokens) - start, budget)
                if self._make_room(sequence, wish, writes):
                    count = min(wish, sequence.capacity) - start
                    chunks.append((sequence, count))
                    budget -= count
        return chunks

    def _make_room(self, sequence: Sequence, end: int, writes: list[BlockWrite]) -> bool:
        """Blocks up to `end` or as far as it goes; is there room for one token at least?"""
        table = sequence.table
        assert table is not None
        end = min(end, sequence.limit - 1)
        while True:
            room = self.kv.grow(table, sequence.row, sequence.oldest_query(), end, writes)
            sequence.capacity = min(room, sequence.limit - 1)
            if sequence.capacity > sequence.scheduled:
                return True
            if self._roster.leaving:
                return False  # blocks are on their way already
            victim = self._roster.last_in_rank()
            if victim is sequence:
                return False
            self._roster.preempt(victim)

    def _place_decodes(self, plan: StepPlan) -> list[Sequence]:
        ready = [s for s in self._roster.decoding.values() if s.scheduled < s.capacity]
        plan.rows.extend([s.row for s in ready])
        plan.starts.extend([s.scheduled for s in ready])
        most = 1 + self.limits.drafts
        if most == 1:
            plan.counts.extend([1] * len(ready))
            for s in ready:
                s.scheduled += 1
                s.in_flight += 1
        else:
            plan.counts.extend([min(most, s.capacity - s.scheduled) for s in ready])
            for s, count in zip(ready, plan.counts, strict=True):
                s.scheduled += count
                s.in_flight += 1
        plan.samples.extend([True] * len(ready))
        return ready

    def _place(
        self, plan: StepPlan, entries: list[Sequence], sequence: Sequence, count: int
    ) -> None:
        """A chunk of known tokens; the last chunk makes the sequence decode from the next step."""
        start, known = sequence.scheduled, len(sequence.tokens)
        end = start + count
        plan.rows.append(sequence.row)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.samples.append(end == known)
        entries.append(sequence)
        sequence.chunk_start = start
        sequence.scheduled = end
        sequence.in_flight += 1
        if end == known:
            del self._roster.prefilling[sequence.id]
            self._roster.decoding[sequence.id] = sequence
        assert sequence.table is not None
        self.kv.enter(sequence.table, sequence.tokens, end, plan.number)

    def _admit(self, plan: StepPlan, entries: list[Sequence]) -> None:
        """Give rows to waiting sequences, in order of rank, and place their first chunks."""
        roster = self._roster
        limits = self.limits
        budget = limits.step_tokens - plan.tokens
        now = self._clock()
        unprepared: list[Sequence] = []
        while budget > 0 and not roster.full and len(unprepared) < LOOK_AHEAD:
            sequence = roster.waiting.peek()
            if sequence is None or roster.still_blocked(sequence):
                break
            if not roster.prepare(sequence):
                unprepared.append(roster.waiting.pop())
                continue
            if limits.whole and len(sequence.tokens) > budget:
                break
            count = roster.enter(sequence, budget)
            if not count:
                break
            assert not limits.whole or count == len(sequence.tokens), "half an input"
            if not sequence.preemptions:
                sequence.scheduled_at = now
            plan.admitted.append(sequence.admission())
            assert sequence.table is not None
            self.kv.writes(sequence.table, sequence.row, plan.blocks)
            self._place(plan, entries, sequence, count)
            budget -= count
        for sequence in unprepared:
            roster.waiting.push(sequence)

    # Books

    def _land(self, plan: StepPlan) -> Flight:
        assert self._flights, "no plan is in flight"
        assert self._flights[0].plan.number == plan.number, "results come in the order of plans"
        return self._flights.popleft()

    def _note(self, flight: Flight, sampled: int) -> None:
        plan = flight.plan
        tokens = plan.tokens
        entries = len(plan.rows)
        decoded = tokens if flight.decodes == entries else sum(plan.counts[: flight.decodes])
        self._last = plan.number, entries, tokens, tokens - decoded, sampled

    def _finish(
        self, sequence: Sequence, finish: FinishReason, error: str | None = None
    ) -> SequenceDelta:
        """End a sequence in any state from outside its own results."""
        self._leave(sequence)
        return end(sequence, finish, error)

    def _leave(self, sequence: Sequence) -> None:
        """The sequence has its answer: it leaves the books of its request."""
        self._roster.leave(sequence, State.FINISHED)
        choices = self._requests[sequence.request.id]
        choices.remove(sequence)
        if not choices:
            del self._requests[sequence.request.id]
        self._retry.finished(self._clock())

    def check_integrity(self) -> None:
        """Assert what holds between any two calls; when idle, that nothing is held."""
        roster = self._roster
        flying = [s for flight in self._flights for s in flight.entries]
        roster.check_integrity(flying)
        live = [s for sequences in self._requests.values() for s in sequences]
        for s in live:
            assert s.state is not State.FINISHED
            assert (s.state is State.RUNNING) == (
                s.id in roster.decoding or s.id in roster.prefilling
            )
            waits = s.state is not State.RUNNING and s.row == NO_ROW
            assert waits == (s in roster.waiting)
            assert s.in_flight == sum(s is other for other in flying)
            assert len(s.tokens) < s.limit
        assert roster.running + len(roster.waiting) <= len(live), "someone runs without a request"
        if not self._flights:
            assert not self.kv.unsettled, "steps are settled or forgotten"
