"""Plans in flight, and the invariants of the scheduler's books between any two calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headrace.base.step import StepPlan

from .encodings import Encodings, SliceEntry
from .roster import Roster
from .work import NO_ROW, State, Work


@dataclass(slots=True)
class Flight:
    """A plan whose result is not there, and its entries."""

    plan: StepPlan
    entries: list[Work]
    decodes: int
    """Number of first entries that decode: one unit, and drafts, each."""
    encoded: SliceEntry | None = None
    """Slices of an encoding, the plan's last entry."""

    def counts(self, sampled: int) -> tuple[int, int, int, int, int]:
        """Return the step's number, entries, units, units of prompts, and new tokens."""
        plan, tokens, entries = self.plan, self.plan.tokens, len(self.entries)
        decoded = tokens if self.decodes == entries else sum(plan.counts[: self.decodes])
        return plan.number, entries, tokens, tokens - decoded, sampled


def check(
    live: list[Work], flights: Collection[Flight], roster: Roster, encodings: Encodings | None
) -> None:
    """Assert the invariants. `live`: all work of requests."""
    flying = [work for flight in flights for work in flight.entries]
    roster.check_integrity(flying)
    for work in live:
        assert work.state is not State.FINISHED
        runs = work.id in roster.decoding or work.id in roster.prefilling
        assert (work.state is State.RUNNING) == runs
        waits = work.state is not State.RUNNING and work.row == NO_ROW
        assert waits == (work in roster.waiting)
        assert work.in_flight == sum(work is other for other in flying)
        assert work.known <= work.limit
    assert roster.running + len(roster.waiting) <= len(live), "someone runs without a request"
    if encodings is not None:
        encoded = [flight.encoded for flight in flights]
        encodings.check_integrity(live, [one.encoding for one in encoded if one is not None])
    if not flights:
        assert not roster.kv.unsettled, "steps are settled or forgotten"
