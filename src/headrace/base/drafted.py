"""Results of drafts: of one sequence in one step, and of a request as a whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Verified(NamedTuple):
    """Drafts of one sequence that one step verified."""

    drafter: str
    tried: int
    accepted: int
    spent: float = 0.0
    """Predicted seconds that the sequence's drafts added to the step. The scheduler fills in this
    and the next; 0 before any decoding step was timed."""
    saved: float = 0.0
    """Predicted seconds of the steps that the accepted drafts replace."""


@dataclass(slots=True)
class Drafted:
    """Results of the drafts of one request, or of several."""

    cases: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """Verifications by drafter, drafts tried and drafts accepted."""
    spent: float = 0.0
    saved: float = 0.0
    """Sums of `Verified`'s seconds."""
    vain: float = 0.0
    """The refused drafts' part of `spent`."""

    def add(self, one: Verified) -> None:
        """Count a verification."""
        self.cases[one[:3]] += 1
        self.spent += one.spent
        self.saved += one.saved
        self.vain += one.spent * (1 - one.accepted / one.tried)

    def join(self, other: Drafted) -> None:
        """Add the results of another request's drafts."""
        self.cases += other.cases
        self.spent += other.spent
        self.saved += other.saved
        self.vain += other.vain

    def totals(self, drafter: str | None = None) -> tuple[int, int, int]:
        """Return (verifications, drafts verified, drafts accepted) of one drafter, or of all."""
        some = [(n, *case) for case, n in self.cases.items() if drafter in (None, case[0])]
        return (
            sum(n for n, *_ in some),
            sum(n * tried for n, _, tried, _ in some),
            sum(n * accepted for n, _, _, accepted in some),
        )

    def told(self) -> dict[str, Any]:
        """Return all fields for an answer: vLLM's names of `metrics.speculative_decoding`, then
        ours. At least one draft must be verified. Seconds are predicted."""
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        drafters = dict.fromkeys(drafter for drafter, _, _ in self.cases)
        drafts, tokens, accepted = self.totals()
        histogram = [0] * (1 + max(one for _, _, one in self.cases))
        for (_, _, one), count in self.cases.items():
            histogram[one] += count
        return {
            "mean_acceptance_length": 1 + accepted / drafts,
            "draft_acceptance_rate": accepted / tokens,
            "acceptance_histogram": histogram,
            "num_spec_steps": drafts,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": tokens,
            "num_spec_tokens": max(tried for _, tried, _ in self.cases),
            "drafters": {one: dict(zip(names, self.totals(one), strict=True)) for one in drafters},
            "saved_seconds": self.saved,
            "spent_seconds": self.spent,
            "vain_seconds": self.vain,
        }
