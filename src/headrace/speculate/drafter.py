"""The seam of all drafters: one object per sequence, told what became text, asked what may follow.

A drafter never decides what is said: the target draws its own token at every position, and a
proposed token is accepted if it is the one that was drawn. So a drafter may be wrong, and it may
be anything that answers these two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence, in their order; none are proposed where it is empty."""

    tokens: Sequence[int] = ()
    matched: int = 0
    """Tokens of context that the drafter saw before: the more, the likelier it is right."""
    drafter: str = ""

    def __len__(self) -> int:
        return len(self.tokens)


NOTHING = Proposal()


class Drafter(Protocol):
    """What guesses the continuation of one sequence."""

    name: str

    def extend(self, tokens: Sequence[int]) -> None:
        """Take what became part of the sequence: prompt, then accepted and drawn tokens. How the
        text is cut into calls does not matter."""

    def propose(self, most: int) -> Proposal:
        """At most `most` tokens that may follow. Asking changes nothing."""
