"""What drafting takes of a step, measured while it is done."""

from __future__ import annotations

from ..base.step import Drafting, StepPlan

MEMORY = 0.1
"""Share of the newest draft in what is known of the time of one."""
LATEST = 0.5
"""Share of the newest in what is known of the time of reading, which comes seldom."""
FORGOTTEN = 0.002
"""Share of that which each step without drafts forgets."""


class DraftCosts:
    """Kept by whoever drafts with a model; each part of a step's time in seconds."""

    def __init__(self, share: float, together: int) -> None:
        """`share`: what one more draft of each row takes of a step before any was timed, which is
        what it reads of what that reads. So many tokens are read in the time of a draft."""
        self._read_share = share
        self.share = share
        """What one more draft of each row takes of a step, as it was lately."""
        self._reading = self.share / together
        """What a token to be read takes of a step, in the same way."""
        self._seconds, self._drafted = 0.0, (0.0, 0)
        """Time that it took since `account` was asked; the part of drafts, and how many of them
        stood one behind the other."""
        self._read = 0
        """Tokens that were read since."""

    def account(self, entries: list[int], step: float) -> Drafting:
        """What it takes, and took since the last time it was asked. `entries`: of the next plan's
        those that it could draft for; `step`: seconds of a step, as they were lately."""
        spent, (seconds, most) = self._seconds, self._drafted
        if step and most:
            self.share += MEMORY * (seconds / most / step - self.share)
        else:
            # What was too dear once is tried again.
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
