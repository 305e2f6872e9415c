"""Amounts that all clients share: a total, and the part of it that one key may take."""

from __future__ import annotations

from collections import Counter

from .errors import Overloaded

MOST_SHARE = 0.5
"""Share of a total that one key may take."""


class Shares:
    """Amounts in use of one total, by owner. The owner without a key may take all of it."""

    def __init__(self, most: int, full: str, retry_after: float = 1.0) -> None:
        """Start with nothing in use. `full`: the clause of the error."""
        self._most, self._full, self._retry_after = most, full, retry_after
        self.held = 0
        self._by_owner: Counter[str] = Counter()

    def take(self, owner: str, amount: int) -> None:
        """Add to an owner's amount. Raises `Overloaded`, and then takes nothing."""
        mine = self._by_owner[owner] + amount
        share = self._most * MOST_SHARE if owner else self._most
        if self.held + amount > self._most or mine > share:
            raise Overloaded(self._full, retry_after=self._retry_after)
        self.held += amount
        self._by_owner[owner] = mine

    def give(self, owner: str, amount: int) -> None:
        """Return an amount that was taken."""
        self.held -= amount
        self._by_owner[owner] -= amount
        if not self._by_owner[owner]:
            del self._by_owner[owner]
