"""Search for special tokens in a text: leftmost first, longest first among those that start
there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping


class SpecialSplitter:
    """Finder of whole tokens in text, in time that does not grow with their number.

    A pattern of the tokens' first two characters finds candidates. A dictionary decides, asked with
    the lengths that occur for these two characters. (One alternation of all tokens costs a test per
    token and character: Gemma has 6,400 of them.)
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._ids = {token: index for token, index in tokens.items() if token}
        lengths: dict[str, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        for head in [head for head in lengths if len(head) == 2]:
            # A one-character token may also stand where a longer one starts.
            lengths[head] |= lengths.get(head[:1], set())
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        self._candidates = _heads_pattern(self._lengths)

    def split(self, text: str) -> Iterator[str | int]:
        """Yield the stretches of plain text (never empty) and the ids of the tokens between
        them."""
        if self._candidates is None:
            if text:
                yield text
            return
        start = position = 0
        while match := self._candidates.search(text, position):
            here = match.start()
            token = self._match(text, here)
            if token is None:
                position = here + 1
                continue
            if here > start:
                yield text[start:here]
            yield self._ids[token]
            start = position = here + len(token)
        if start < len(text):
            yield text[start:]

    def places(self, text: str, start: int, end: int) -> Iterator[int]:
        """Yield the places where tokens begin in a part of a text."""
        if self._candidates is None:
            return
        for match in self._candidates.finditer(text, start, end + 1):
            if match.start() < end and self._match(text, match.start()) is not None:
                yield match.start()

    def _match(self, text: str, here: int) -> str | None:
        head = text[here : here + 2]
        lengths = self._lengths.get(head)
        if lengths is None:
            lengths = self._lengths.get(head[:1], [])
        for length in lengths:
            token = text[here : here + length]
            if len(token) == length and token in self._ids:
                return token
        return None


def _heads_pattern(heads: Iterable[str]) -> re.Pattern[str] | None:
    """Make one pattern for all heads of one or two characters, the second ones as a class."""
    second: dict[str, set[str]] = {}
    single: set[str] = set()
    for head in heads:
        if len(head) == 1:
            single.add(head)
        else:
            second.setdefault(head[0], set()).add(head[1])
    branches = [f"[{''.join(map(re.escape, sorted(single)))}]"] if single else []
    for first, followers in sorted(second.items()):
        if first not in single:
            branches.append(f"{re.escape(first)}[{''.join(map(re.escape, sorted(followers)))}]")
    return re.compile("|".join(branches)) if branches else None
