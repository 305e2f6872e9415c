"""Acceptance rates of proposals, counted per drafter, matched length and position.

Whether a token is accepted, given that all before it were, is a Bernoulli trial. Its mean under a
Beta prior is (prior + accepted) / (strength + tried). There are three levels of counts: a cell
(drafter, matched length, position) has its row (drafter, matched length) as prior. A row's prior is
the chance of a text drafter before any trial.
"""

from __future__ import annotations

from collections import defaultdict

from .drafter import Proposal

STRENGTH = 8.0
"""Number of trials for which a prior counts."""
MEMORY = 256.0
"""Trials after which a counter halves its counts, since texts change."""
POSITIONS = 8
"""Positions that are counted separately; later ones count as the last."""
PRIOR = (0.2, 0.35, 0.5, 0.7, 0.8, 0.85, 0.9)
"""Chance by class of matched length, before any trial: 0, 1, 2 to 3, 4 to 7, … 32 and more
tokens."""
SURE = "forced"
"""Name of the drafter whose tokens cannot be refused."""


class _Counter:
    """Trials and successes of one kind, with decay."""

    __slots__ = ("accepted", "tried")

    def __init__(self) -> None:
        self.accepted = self.tried = 0.0

    def add(self, accepted: bool) -> None:
        if self.tried >= MEMORY:
            self.accepted /= 2
            self.tried /= 2
        self.accepted += accepted
        self.tried += 1

    def mean(self, prior: float) -> float:
        return (STRENGTH * prior + self.accepted) / (STRENGTH + self.tried)


class Acceptance:
    """Estimated chances of the proposals of one tenant's sequences."""

    def __init__(self) -> None:
        self._rows: defaultdict[tuple[str, int], _Counter] = defaultdict(_Counter)
        self._cells: defaultdict[tuple[str, int, int], _Counter] = defaultdict(_Counter)

    def record(self, proposal: Proposal, accepted: int) -> None:
        """Count a verified proposal of which the target drew the first `accepted` tokens. Tokens
        after the first refused one were not tried."""
        drafter, length = proposal.drafter, _length(proposal.matched)
        for position in range(min(accepted + 1, len(proposal))):
            right = position < accepted
            self._rows[drafter, length].add(right)
            self._cells[drafter, length, min(position, POSITIONS - 1)].add(right)

    def chances(self, proposal: Proposal) -> list[float]:
        """Return each token's chance of acceptance, given that all before it were accepted."""
        if proposal.drafter == SURE:
            return [1.0] * len(proposal)
        drafter, length = proposal.drafter, _length(proposal.matched)
        row = self._rows.get((drafter, length))
        prior = row.mean(PRIOR[length]) if row else PRIOR[length]
        chances = []
        for position in range(min(len(proposal), POSITIONS)):
            cell = self._cells.get((drafter, length, position))
            chances.append(cell.mean(prior) if cell else prior)
        return chances + chances[-1:] * (len(proposal) - len(chances))

    def survival(self, proposal: Proposal) -> list[float]:
        """Return for each token the chance that it and all before it are accepted."""
        survived, alive = [], 1.0
        for chance in self.chances(proposal):
            alive *= chance
            survived.append(alive)
        return survived


def _length(matched: int) -> int:
    """Return the class of a matched length: 0, 1, 2 to 3, 4 to 7, …"""
    return min(matched.bit_length(), len(PRIOR) - 1)
