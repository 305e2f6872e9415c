"""Costs of drafting as a share of a step, measured while drafting."""

from __future__ import annotations

from ..base.step import Drafting, StepPlan

MEMORY = 0.1
"""Weight of the newest draft in the running average of a draft's time."""
LATEST = 0.5
"""Weight of the newest reading in its running average; readings are rare."""
FORGOTTEN = 0.002
"""Share of the average that each step without drafts forgets."""


class DraftCosts:
    """Running costs of a model drafter; each part of a step's time in seconds."""

    def __init__(self, share: float, together: int) -> None:
        """Start from an estimate, before any step was timed.

        `share`: cost of one more draft of each row as a share of a step, estimated by the bytes
        read. `together`: tokens read in the time of one draft.
        """
        self._read_share = share
        self.share = share
        """Recent cost of one more draft of each row, as a share of a step."""
        self._reading = self.share / together
        """Recent cost of reading one token, as a share of a step."""
        self._seconds, self._drafted = 0.0, (0.0, 0)
        """Seconds spent since the last `account`; the part spent on drafts, and the number of
        drafts in sequence."""
        self._read = 0
        """Tokens read since then."""

    def account(self, entries: list[int], step: float) -> Drafting:
        """Return the cost of drafting, and the time spent since the last call. `entries`: those of
        the next plan that it could draft for; `step`: recent seconds of a step."""
        spent, (seconds, most) = self._seconds, self._drafted
        if step and most:
            self.share += MEMORY * (seconds / most / step - self.share)
        else:
            # A drafter that was too expensive once is retried.
            self.share += FORGOTTEN * (self._read_share - self.share)
        if step and self._read:
            self._reading += LATEST * ((spent - seconds) / self._read / step - self._reading)
        self._seconds, self._drafted, self._read = 0.0, (0.0, 0), 0
        return Drafting(entries, self.share * step, spent, (self.share, self._reading))

    def follow(self, costs: tuple[float, float]) -> None:
        """Take `Drafting.costs` of the rank whose clock counts."""
        self.share, self._reading = costs


def enter(plan: StepPlan, row: int, start: int, count: int, *, samples: bool) -> None:
    """Add an entry to a plan in the making."""
    plan.rows.append(row)
    plan.starts.append(start)
    plan.counts.append(count)
    plan.samples.append(samples)
