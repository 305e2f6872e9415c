"""Interface of all drafters: one object per sequence, fed with its text and asked for guesses.

A drafter never decides the output: the target draws its own token at every position, and a proposed
token is accepted if it equals the drawn one. So a drafter may be wrong, and may be any object with
these two methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence, in order; an empty proposal proposes nothing."""

    tokens: Sequence[int] = ()
    matched: int = 0
    """Tokens of matching context: the more, the more likely it is right."""
    drafter: str = ""

    def __len__(self) -> int:
        return len(self.tokens)


NOTHING = Proposal()


class Drafter(Protocol):
    """Guesser of the continuation of one sequence."""

    name: str

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that became part of the sequence: prompt, then accepted and drawn tokens. The
        cut of the text into calls does not matter."""

    def propose(self, most: int) -> Proposal:
        """Return at most `most` tokens that may follow. Changes nothing."""
