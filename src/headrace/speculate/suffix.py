"""Continuations by frequency: in the sequence itself and in past answers.

A draft follows the likeliest tokens after the longest known context, as long as the path's
frequency allows (SuffixDecoding, arXiv 2411.04975, sections 4.1 and 4.2). The paper's speculation
tree is a single path here, because every verified token costs time on a CPU.

Past answers are those of one tenant. They are kept in two generations, each at most half of the
tenant's bytes. When the younger is full the older is dropped as a whole, so nothing is ever removed
from an automaton.
"""

from __future__ import annotations

from collections.abc import Sequence

from .automaton import DEPTH, Context, SuffixAutomaton, empty
from .drafter import NOTHING, Proposal

BYTES = 8 << 20
"""Memory of a tenant's past answers."""
LEAST = 0.1
"""Frequency below which a path is not followed (the paper's threshold)."""
SHORTEST = 2
"""Fewest tokens of context for a proposal."""
PORTION = 64
"""Tokens added between two checks of the bytes held."""
PORTION_BYTES = 160 << 10
"""Most bytes that these may add: a dictionary with an edge for each state of a window."""
GROWTH = 4 / 3
"""Factor by which arrays and dictionaries may grow at once, to have spare room."""


class Corpus:
    """Past answers of one tenant, bounded in bytes."""

    def __init__(self, bound: int = BYTES) -> None:
        """`bound`: bytes that are never exceeded."""
        self._half = bound // 2
        self.generations: tuple[SuffixAutomaton, ...] = ()
        """Generations, the youngest first, at most two."""

    @property
    def held(self) -> int:
        """Bytes of memory."""
        return sum(one.held for one in self.generations)

    def add(self, text: Sequence[int], behind: Sequence[int] = ()) -> None:
        """Remember a part of an answer, which follows the tokens `behind`. If it does not fit, the
        oldest generation is dropped."""
        if self._half < PORTION_BYTES:
            return  # Not even a portion fits.
        for begin in range(0, len(text), PORTION):
            if not self.generations or self._full(self.generations[0]):
                self.generations = (SuffixAutomaton(), *self.generations[:1])
            youngest = self.generations[0]
            behind = [*behind, *text[max(begin - PORTION, 0) : begin]][-DEPTH:]
            youngest.cut(behind)
            youngest.extend(text[begin : begin + PORTION])

    def _full(self, youngest: SuffixAutomaton) -> bool:
        return youngest.held * GROWTH + PORTION_BYTES > self._half


class SuffixDrafter:
    """Drafter of the likeliest path after the longest known context, in the sequence's own text or
    in past answers, whichever is expected to match longer."""

    name = "suffix"

    def __init__(self, corpus: Corpus | None = None) -> None:
        """`corpus`: past answers; None: only the sequence's own text counts."""
        self._corpus = corpus
        self._own = SuffixAutomaton()
        self._last: list[int] = []
        """The last `DEPTH` tokens, with which a changed corpus is searched again."""
        self._found: list[tuple[SuffixAutomaton, int, Context[int]]] = []
        """Each generation, its size when it was searched, and its longest known context."""

    def extend(self, tokens: Sequence[int]) -> None:
        self._own.extend(tokens)
        self._last = [*self._last, *tokens[-DEPTH:]][-DEPTH:]
        if len(tokens) >= DEPTH:
            self._found = []
        for text, _, context in self._found:
            text.follow(context, tokens)

    def propose(self, most: int) -> Proposal:
        # The end itself is an occurrence without a next token.
        best = self._own.path(self._own.end, most, 1, SHORTEST, LEAST)
        for text, context in self._contexts():
            other = text.path(context, most, 0, SHORTEST, LEAST)
            if other[2] > best[2]:
                best = other
        tokens, matched, _ = best
        return Proposal(tokens, matched, self.name) if tokens else NOTHING

    def _contexts(self) -> list[tuple[SuffixAutomaton, Context[int]]]:
        """Return the longest known context in each generation of the past answers."""
        generations = self._corpus.generations if self._corpus else ()
        if [(one, one.size) for one in generations] != [one[:2] for one in self._found]:
            self._found = []
            for text in generations:
                context = empty()
                text.follow(context, self._last)
                self._found.append((text, text.size, context))
        return [(text, context) for text, _, context in self._found]
