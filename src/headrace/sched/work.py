"""Work: the scheduler's view of anything that it plans.

    WAITING ──► RUNNING ──► FINISHED        (WAITING and PREEMPTED can be aborted, too)
                 ▲   │
                 │   ▼
               PREEMPTED

Only RUNNING work holds a row, resources and, if it keeps something between steps, a block table.
There is one exception: work that stops running while steps in flight contain it keeps all three
until the last of these is done.

Its units (tokens of a text or an input, steps of a loop) have these regions while it runs:

    [0, scheduled)      computed, or in a step in flight (with drafts: an upper bound)
    [scheduled, known)  to be computed, in atoms: `known` units are there
    [.., capacity)      there are blocks for these
    limit               units that are ever computed; `known` grows up to there

`scheduled` may exceed `known` only with steps in flight, whose results are not back yet.

A kind of work is a subclass: text that grows token by token (`sequence.Sequence`), an input that is
computed once (`once.Once`). The scheduler knows none of them by name.
"""

from __future__ import annotations

from enum import Enum

from headrace.base.errors import InvalidRequest
from headrace.base.request import FinishReason, Request, SequenceDelta
from headrace.base.step import Admission, StepPlan, StepResult
from headrace.kv import BlockTable, PrefixChain


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


LEGAL = {
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.PREEMPTED, State.FINISHED},
    State.PREEMPTED: {State.RUNNING, State.FINISHED},
    State.FINISHED: set(),
}
NO_ROW = -1
ALL = 2**62
"""The atom of work that cannot be cut."""


class Work:
    """The state of one piece of work. Changed by the scheduler only."""

    __slots__ = (
        "admitted", "atom", "atoms", "cached", "capacity", "chain", "choice", "chunk_start",
        "drafts", "id", "in_flight", "keeps", "limit", "loaded", "preemptions", "promised",
        "prompt_length", "rank", "ready", "request", "row", "scheduled", "scheduled_at", "state",
        "table", "tokens", "void_until",
    )  # fmt: skip

    joint = False
    """Whether it makes one answer with the other work of its request, and ends with it."""

    def __init__(
        self,
        id: int,
        request: Request,
        choice: int,
        limit: int,
        rank: tuple[float, int],
        *,
        keeps: bool = True,
        atom: int = 1,
    ) -> None:
        self.id = id
        self.request = request
        self.choice = choice
        self.tokens = request.prompt.copy()
        """Prompt and generated tokens."""
        self.prompt_length = len(request.prompt)
        self.limit = limit
        self.atom = atom
        """A step computes a multiple of this number of units, counted from the first, or all the
        rest."""
        assert atom == 1 or not keeps, "what lies in blocks is cut anywhere"
        self.atoms = tuple((one.first, one.end) for one in request.spec.inputs if one.mutual)
        """Units [first, end) that see each other: a step computes all of them, or all the rest."""
        self.keeps = keeps
        """Whether it keeps anything between two steps, in blocks."""
        self.rank = rank
        """Place in the order of service, for life: lower is served first, preempted last."""
        self.chain: PrefixChain | None = None
        """Names of its prefixes; None: it neither finds nor leaves any."""
        self.state = State.WAITING
        self.preemptions = 0
        self.cached = 0
        """Units that came from the prefix index when it first ran."""
        self.loaded = 0
        """Units of these that a lower tier brought for it."""
        self.scheduled_at = 0.0
        # Valid while it holds a row:
        self.row = NO_ROW
        self.table: BlockTable | None = None
        self.admitted = 0
        """Units known at admission."""
        self.chunk_start = 0
        """Start of its oldest chunk in flight."""
        self.scheduled = 0
        self.ready = ALL
        """Units before the first that waits for an encoding."""
        self.capacity = 0
        self.drafts = b""
        """Drafts that are ready for its next step, as `StepResult.proposed` has them."""
        self.promised = False
        """Whether these drafts are still to be made, when the step begins."""
        self.in_flight = 0
        """Steps in flight that contain it."""
        self.void_until = -1
        """Results of steps up to this number are dropped: they rest on a step that failed."""

    @property
    def known(self) -> int:
        """Units that can be computed now."""
        return len(self.tokens)

    @property
    def reads(self) -> bool:
        """Whether it may take up hits of the prefix index."""
        return self.chain is not None

    def chunk(self, start: int, room: int, most: int = 0) -> int:
        """Return the most units from `start` that `room` holds and the atom allows; 0 if none.
        `most`: a larger room, for units that see each other and do not fit otherwise."""
        end = self.known
        if self.ready < end:
            end = self.ready if self.atom == 1 else start
        left = end - start
        if left <= room:
            return max(0, left)
        count = (start + room) // self.atom * self.atom - start
        for first, behind in self.atoms:
            if first < start + count < behind:
                alone = self.least(start)
                count = first - start if first > start else alone if alone <= most else 0
                break
        return max(0, count)

    def least(self, start: int) -> int:
        """Return the fewest units from `start` that can be kept if only they are computed."""
        return next((end - start for first, end in self.atoms if first <= start < end), 1)

    def oldest_query(self) -> int:
        """Return the first position from which a step in flight, or the next one, looks back."""
        return self.chunk_start if self.in_flight else self.scheduled

    def admission(self) -> Admission:
        """Return the message to the worker when the work takes a row."""
        tokens, request = self.tokens.copy(), self.request
        length, choice, spec = self.prompt_length, self.choice, request.spec
        return Admission(self.row, self.id, tokens, length, choice, spec, request.tenant)

    def take(
        self, plan: StepPlan, result: StepResult, entry: int, *, grows: bool
    ) -> SequenceDelta | None:
        """Book the result of a step for it, as entry number `entry`; return the delta for its
        reader, if any.

        `grows`: the step computed units that were not known when it was planned.
        """
        raise NotImplementedError

    def goes_on(self, new: list[int]) -> bool:
        """Take one new token that does not end the work; return whether it is such a one, and
        nothing is taken otherwise."""
        return False

    def further(self, order: int) -> list[Work]:
        """Return the work that begins since this joint work has ended, numbered from `order`."""
        return []

    def move(self, state: State) -> None:
        """Change the state; nothing else does."""
        assert state in LEGAL[self.state], f"{self.state} → {state}"
        self.state = state

    def news(self) -> SequenceDelta:
        """Make an empty delta. By position: this is made for every entry of every step."""
        delta = SequenceDelta(
            self.request.id,
            self.choice,
            [],
            None,
            None,
            None,
            None,
            None,
            500,
            self.cached,
            self.scheduled_at,
            self.preemptions,
        )
        if self.loaded:
            delta.loaded = min(self.loaded, self.cached)
        return delta

    def end(self, finish: FinishReason, error: str | None = None) -> SequenceDelta:
        """Make the last delta of work that ends otherwise than by a token."""
        delta = self.news()
        delta.finish, delta.error = finish, error
        return delta

    def fault(self, why: str) -> SequenceDelta:
        """Make the final delta of work that failed because of its own input."""
        delta = self.end("error", why)
        delta.error_status = InvalidRequest.status
        return delta

    def __repr__(self) -> str:
        progress = f"{self.scheduled}/{self.known}"
        return f"<{self.request.id}/{self.choice} {self.state.value} {progress}>"
