"""The suffix automaton of `text/csrc/automaton.cpp`: growing texts and the tokens that followed
each context."""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from collections.abc import Sequence

from ..base.textlibrary import absence, library

DEPTH = 24
"""Tokens of context that are considered."""
WINDOW = 256
"""Tokens of one window of the automaton; windows overlap by the depth."""
NONE = -1
"""No token."""
_LONG = 512
"""Tokens from which on a call releases the interpreter's lock."""

Context = array
"""A state of one automaton, and the length of the context that it stands for here."""


def empty() -> Context[int]:
    """Return the context of no token, valid in any automaton."""
    return array("i", (0, 0))


class SuffixAutomaton:
    """Texts, one after the other, and counts of each token after each context."""

    def __init__(self, depth: int = DEPTH, window: int = WINDOW) -> None:
        """`depth`: tokens of context that are considered. `window`: tokens of a window, more than
        `depth`. Raises `MemoryError`, and RuntimeError without the library."""
        assert 0 < depth < window
        short, long = library(ctypes.PyDLL), library()
        if short is None or long is None:
            raise RuntimeError(absence())
        self._depth, self._calls, self._extend = depth, short, long.hrt_automaton_extend
        self._handle = short.hrt_automaton_new(depth, window, int.from_bytes(os.urandom(8)))
        if not self._handle:
            raise MemoryError("no memory for what sequences said")
        weakref.finalize(self, short.hrt_automaton_free, self._handle).atexit = False
        self._path = short.hrt_automaton_path
        self._score = array("d", (0.0,))
        self._score_at = self._score.buffer_info()[0]
        self.size = 0
        """Tokens of all texts."""

    @property
    def held(self) -> int:
        """Bytes of memory."""
        found: int = self._calls.hrt_automaton_held(self._handle)
        return found

    @property
    def end(self) -> Context[int]:
        """Context of the text's last tokens, `depth` at most."""
        context = empty()
        self._calls.hrt_automaton_end(self._handle, context.buffer_info()[0])
        return context

    def cut(self, behind: Sequence[int] = ()) -> None:
        """Start a new text, or continue after a text's last tokens, which are not counted again."""
        tokens = array("i", behind[-self._depth :])
        _taken(self._calls.hrt_automaton_cut(self._handle, *tokens.buffer_info()))

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the current text."""
        given = array("i", tokens)
        call = self._extend if len(given) >= _LONG else self._calls.hrt_automaton_extend
        _taken(call(self._handle, *given.buffer_info()))
        self.size += len(tokens)

    def follow(self, context: Context[int], tokens: Sequence[int]) -> None:
        """Replace a context by the longest suffix of it and `tokens` that the texts contain."""
        address, given = context.buffer_info()[0], array("i", tokens)
        self._calls.hrt_automaton_follow(self._handle, address, *given.buffer_info())

    def path(
        self, context: Context[int], most: int, ends: int, shortest: int, least: float
    ) -> tuple[list[int], int, float]:
        """Follow a path from a context, shortened until something followed it. Each step goes to
        the token that followed most often, the latest among equals.

        Returns (at most `most` tokens, length of the context, expected number of accepted tokens).
        The path is empty if the context has fewer than `shortest` tokens. It ends where its
        frequency falls below `least`. `ends`: occurrences of the context without a next token yet.
        """
        at, out = array("i", context), array("i", bytes(4 * most))
        given = self._handle, at.buffer_info()[0], ends, shortest, most, least
        count = self._path(*given, out.buffer_info()[0], self._score_at)
        return out[:count].tolist(), at[1], self._score[0]

    def counts(self, context: Context[int]) -> tuple[int, int]:
        """Return (occurrences of a context, the token that followed it most often, or `NONE`)."""
        out = array("i", (0, 0))
        given = context.buffer_info()[0], out.buffer_info()[0]
        self._calls.hrt_automaton_counts(self._handle, *given)
        return out[0], out[1]


def _taken(result: int) -> None:
    if result < 0:
        raise MemoryError("no memory for what sequences said")
