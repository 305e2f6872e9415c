"""A sequence: what the engine computes, one of the n choices of a request.

    WAITING ──► RUNNING ──► FINISHED        (WAITING and PREEMPTED can be aborted, too)
                 ▲   │
                 │   ▼
               PREEMPTED

Only RUNNING sequences hold a row, a block table and resources, with one exception: whoever stops
running while steps that contain it are in flight keeps all three until the last of them is done.

The regions of its token range, while it runs:

    [0, scheduled)      computed, or in a step in flight (with drafts: an upper bound)
    [scheduled, known)  to be computed: known = len(tokens)
    [.., capacity)      there are blocks for these, and the sequence may become as long
    limit               total length at which it finishes with "length"

`scheduled` may exceed `known` only with steps in flight, whose tokens are not back yet.
"""

from __future__ import annotations

from enum import Enum

from headrace.base.request import Request
from headrace.base.step import Admission
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


class Sequence:
    """Record of one sequence. Changed by the scheduler only."""

    __slots__ = (
        "admitted", "cached", "capacity", "chain", "choice", "chunk_start", "id", "in_flight",
        "limit", "min_length", "preemptions", "prompt_length", "rank", "request", "row",
        "scheduled", "scheduled_at", "scored", "state", "stops", "table", "tokens", "void_until",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        request: Request,
        choice: int,
        limit: int,
        rank: tuple[float, int],
        chain: PrefixChain | None,
    ) -> None:
        self.id = id
        self.request = request
        self.choice = choice
        self.tokens = request.prompt.copy()
        """Prompt and what was generated."""
        self.prompt_length = len(request.prompt)
        self.limit = limit
        spec = request.spec
        least = spec.sampling.min_tokens if spec.grammar is None else 0
        self.min_length = self.prompt_length + least
        """Total length below which a stop id does not count. A grammar may be complete before
        `min_tokens`: then the worker gives nothing but an end, and else no early one."""
        self.stops = frozenset(spec.stop_ids)
        self.rank = rank
        """Place in the order of service, for life: lower is served first, preempted last."""
        self.chain = chain
        self.state = State.WAITING
        self.preemptions = 0
        self.cached = 0
        """Prompt tokens that came from the prefix index when it first ran."""
        self.scheduled_at = 0.0
        self.scored = 1
        """Prompt positions whose log-probability was delivered; nothing predicts the first."""
        # Of the present stay in a row:
        self.row = NO_ROW
        self.table: BlockTable | None = None
        self.admitted = 0
        """Tokens known at admission."""
        self.chunk_start = 0
        """Start of the latest chunk of these."""
        self.scheduled = 0
        self.capacity = 0
        self.in_flight = 0
        """Steps in flight that contain the sequence."""
        self.void_until = -1
        """Results of steps up to this number are dropped: they rest on a step that failed."""

    def move(self, state: State) -> None:
        """The one way to change the state."""
        assert state in LEGAL[self.state], f"{self.state} → {state}"
        self.state = state

    @property
    def scores_prompt(self) -> bool:
        """Does it still owe log-probabilities of prompt tokens? Choice 0 delivers them for all."""
        return (
            self.choice == 0
            and self.request.spec.sampling.prompt_logprobs is not None
            and self.scored < self.prompt_length
        )

    def oldest_query(self) -> int:
        """The first position from which a step in flight, or the next one, looks back."""
        if not self.in_flight:
            return self.scheduled
        # Once a token came back, the step in flight starts at the last one known; with drafts
        # its planned start is only an upper bound of that.
        return self.chunk_start if len(self.tokens) == self.admitted else len(self.tokens) - 1

    def admission(self) -> Admission:
        return Admission(
            self.row,
            self.id,
            self.tokens.copy(),
            self.prompt_length,
            self.choice,
            self.request.spec,
        )

    def __repr__(self) -> str:
        progress = f"{self.scheduled}/{len(self.tokens)}"
        return f"<{self.request.id}/{self.choice} {self.state.value} {progress}>"
