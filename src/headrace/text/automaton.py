"""Search for the first of several strings in a text that arrives in parts (Aho and Corasick 1975).

After each character the state is the longest beginning of any pattern that the text so far ends
with. Exactly these characters must be held back, because the next ones may complete the pattern. So
a character costs a dictionary look-up, whatever the number and length of the patterns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class Automaton:
    """Immutable matcher; one may serve many streams. `patterns` are non-empty strings."""

    __slots__ = ("_depth", "_fail", "_found", "_next", "patterns")

    def __init__(self, patterns: Sequence[str]) -> None:
        assert all(patterns)
        self.patterns = tuple(dict.fromkeys(patterns))
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for pattern in self.patterns:
            state = 0
            for char in pattern:
                following = self._next[state].get(char)
                if following is None:
                    following = len(self._next)
                    self._next[state][char] = following
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._found.append(None)
                state = following
            self._found[state] = pattern
        self._fail = self._failures()

    def _failures(self) -> list[int]:
        """Return for each state the longest proper suffix that is a state too; breadth first."""
        fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            # A pattern that ends here inside a longer one; the longest of them is the first.
            if self._found[state] is None:
                self._found[state] = self._found[fail[state]]
            for char, following in self._next[state].items():
                fail[following] = self._step(fail[state], char, fail)
                queue.append(following)
        return fail

    def _step(self, state: int, char: str, fail: list[int]) -> int:
        while char not in self._next[state] and state:
            state = fail[state]
        return self._next[state].get(char, 0)

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Return (state, characters read, pattern found).

        Stops right after the first complete pattern; of several that end there it finds the
        longest.
        """
        step, found, start = self._next, self._found, self._next[0]
        fail = self._fail
        for place, char in enumerate(text):
            if state:
                following = step[state].get(char)
                while following is None and state:
                    state = fail[state]
                    following = step[state].get(char)
                state = following or 0
            else:
                state = start.get(char, 0)
            if found[state] is not None:
                return state, place + 1, found[state]
        return state, len(text), None

    def passes(self, text: str) -> bool:
        """Return whether this text, read from the start, has no first character of any pattern."""
        return self._next[0].keys().isdisjoint(text)

    def held(self, state: int) -> int:
        """Return the number of characters at the text's end that may begin a pattern."""
        return self._depth[state]


@lru_cache(256)
def automaton_of(patterns: tuple[str, ...]) -> Automaton:
    """Return the automaton of these patterns, shared by all callers."""
    return Automaton(patterns)
