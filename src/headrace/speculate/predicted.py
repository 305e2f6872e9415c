"""The text that a client expects, followed as long as the answer matches it.

OpenAI's `prediction`: a client that wants a file edited sends the current file, and most of the
answer is a copy. If the answer departs, the drafter looks for the place where it rejoins the text.
That is after the nearest token ahead that equals the last one (a replacement or a deletion), or
after a longer run anywhere (an insertion or a move).
"""

from __future__ import annotations

from collections.abc import Sequence

from .drafter import NOTHING, Proposal
from .ngram import REACH

NEAR = 32
"""Tokens ahead within which a single equal token is enough."""
RUN = 3
"""Number of equal tokens that suffice anywhere."""


class PredictedDrafter:
    """Drafter of the rest of an expected text, from the answer's current place."""

    name = "prediction"

    def __init__(self, expected: Sequence[int], prompt: int = 0) -> None:
        """`expected`: the text, as tokens. `prompt`: number of first tokens that are not compared
        with it."""
        self._prompt = prompt
        self._expected = list(expected)
        self._runs: dict[tuple[int, ...], list[int]] = {}
        """`RUN` tokens → the places after them, ascending."""
        for end in range(RUN, len(expected) + 1):
            run = tuple(self._expected[end - RUN : end])
            self._runs.setdefault(run, []).append(end)
        self.kept = 0
        """Tokens of the answer that matched the text at its place, or after an equal run."""
        self._last: tuple[int, ...] = ()
        self._at = 0
        """Place in the expected text after the tokens so far."""
        self._matched = 0
        """Tokens in a row that matched the text; zero: the place is lost, or there is no answer
        yet."""
        self._lost = False

    def extend(self, tokens: Sequence[int]) -> None:
        prompt = min(self._prompt, len(tokens))
        self._prompt -= prompt
        for token in tokens[prompt:]:
            self._take(token)

    def propose(self, most: int) -> Proposal:
        tokens = [] if self._lost else self._expected[self._at : self._at + max(most, 0)]
        return Proposal(tokens, self._matched, self.name) if tokens else NOTHING

    def _take(self, token: int) -> None:
        expected, at = self._expected, self._at
        self._last = (*self._last, token)[-RUN:]
        if not self._lost and at < len(expected) and expected[at] == token:
            self._at, self._matched = at + 1, min(self._matched + 1, REACH)
            self.kept += 1
            return
        places = self._runs.get(self._last)
        if places:
            # The nearest place ahead, else the nearest before.
            self._at = next((place for place in places if place >= at), places[-1])
            self._matched, self._lost = RUN, False
            self.kept += 1
        elif token in expected[at : at + NEAR]:
            self._at = expected.index(token, at) + 1
            self._matched, self._lost = 1, False
            self.kept += 1
        else:
            self._matched, self._lost = 0, True
