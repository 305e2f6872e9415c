"""Lookup in the sequence itself: the continuation of an earlier occurrence of its last tokens.

Known as prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding), here
over prompt and output. For each of a few lengths, the index holds the last place of each run of
tokens. So a look-up is one dictionary read per length.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from .drafter import NOTHING, Proposal

LENGTHS = (8, 5, 3, 2)
REACH = 64
"""Most tokens of matched context that are counted; more carry no information."""


class NGramDrafter:
    """Drafter of the tokens that followed the most recent earlier occurrence of the last n tokens.
    n is the largest of its lengths that has one.

    At the end of the known text a proposal continues with its own tokens, like a copy that reads
    its own output (Ziv and Lempel 1977): after `a b a b` come `a b a b …`.
    """

    name = "ngram"

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        """`lengths`: lengths of the runs that are looked up."""
        self._lengths = sorted(lengths, reverse=True)
        self._tokens = array("i")
        self._seen: dict[bytes, int] = {}
        """Run of tokens (as bytes: runs of different lengths never collide) → place of the token
        that last followed it."""

    def extend(self, tokens: Sequence[int]) -> None:
        text, seen = self._tokens, self._seen
        known = max(len(text), 1)
        text.extend(tokens)
        packed = text.tobytes() if len(tokens) > 1 else b""
        for length in self._lengths:
            # A run is entered once something follows it: at `known`, the first new token.
            if packed:
                first = max(known, length)
                seen.update(
                    (packed[4 * (at - length) : 4 * at], at) for at in range(first, len(text))
                )
            elif length <= known < len(text):
                seen[text[known - length : known].tobytes()] = known

    def propose(self, most: int) -> Proposal:
        text = self._tokens
        for length in self._lengths:
            at = self._seen.get(text[-length:].tobytes()) if length <= len(text) else None
            if at is not None and most > 0:
                period = len(text) - at
                tokens = text[at : at + most].tolist()
                tokens.extend(tokens[one % period] for one in range(len(tokens), most))
                return Proposal(tokens, self._matched(at, length), self.name)
        return NOTHING

    def _matched(self, at: int, least: int) -> int:
        """Return how many tokens before `at` equal the last ones of the text."""
        text = self._tokens
        apart = len(text) - at
        begin = at - least
        while begin > 0 and at - begin < REACH and text[begin - 1] == text[begin - 1 + apart]:
            begin -= 1
        return at - begin
