"""Continuations by how often they followed: in the sequence itself and in past answers.

A draft follows the likeliest token from the longest context that was seen before, as long as the
path's frequency allows (SuffixDecoding, arXiv 2411.04975, sections 4.1 and 4.2; its speculation
tree is a single path here, because every token that is verified costs on a CPU).

Past answers are those of one tenant. They are kept in two generations, each at most half of the
tenant's bytes: when the younger is full the older is dropped, so that what is old goes as a whole
and nothing is ever taken out of an automaton.
"""

from __future__ import annotations

from collections.abc import Sequence

from .automaton import DEPTH, NONE, ROOT, Context, SuffixAutomaton
from .drafter import NOTHING, Proposal

BYTES = 8 << 20
"""Memory of a tenant's past answers."""
LEAST = 0.1
"""Frequency below which a path is not followed (the paper's threshold)."""
SHORTEST = 2
"""Tokens of context without which nothing is proposed."""
PORTION = 64
"""Tokens that are added between two looks at the bytes held."""
PORTION_BYTES = 160 << 10
"""What they may add at most: an edge in a dictionary of its own for each state of a window."""
GROWTH = 4 / 3
"""By how much arrays and dictionaries may grow in one go, to have room."""


class Corpus:
    """Past answers of one tenant, bounded in bytes."""

    def __init__(self, bound: int = BYTES) -> None:
        """`bound`: bytes that are never exceeded."""
        self._half = bound // 2
        self.generations: tuple[SuffixAutomaton, ...] = (SuffixAutomaton(),)
        """The youngest first."""

    @property
    def held(self) -> int:
        """Bytes of memory."""
        return sum(one.held for one in self.generations)

    def add(self, text: Sequence[int], behind: Sequence[int] = ()) -> None:
        """Remember a part of an answer, which stands behind `behind`. Where it does not fit, the
        oldest generation goes."""
        for begin in range(0, len(text), PORTION):
            youngest = self.generations[0]
            if youngest.held * GROWTH + PORTION_BYTES > self._half:
                if youngest.size == 0:
                    return  # Not even a portion fits.
                youngest = SuffixAutomaton()
                self.generations = (youngest, self.generations[0])
            behind = [*behind, *text[max(begin - PORTION, 0) : begin]][-DEPTH:]
            youngest.cut(behind)
            youngest.extend(text[begin : begin + PORTION])


class SuffixDrafter:
    """Proposes the likeliest path behind the longest known context, of the sequence's own text or
    of past answers, whichever is expected to hold for longer."""

    name = "suffix"

    def __init__(self, corpus: Corpus | None = None) -> None:
        """`corpus`: past answers; None: only the sequence's own text counts."""
        self._corpus = corpus
        self._own = SuffixAutomaton()
        self._last: list[int] = []
        """The last `DEPTH` tokens, with which a changed corpus is looked at anew."""
        self._found: list[tuple[SuffixAutomaton, int, Context]] = []
        """Each generation with its size when it was looked at, and its longest known context."""

    def extend(self, tokens: Sequence[int]) -> None:
        self._own.extend(tokens)
        self._last = [*self._last, *tokens[-DEPTH:]][-DEPTH:]
        found = []
        for text, size, context in self._found if len(tokens) < DEPTH else ():
            for token in tokens:
                context = text.next(context, token)
            found.append((text, size, context))
        self._found = found

    def propose(self, most: int) -> Proposal:
        own, context = self._own, self._own.end
        while own.count(context) < 2 and context[1]:
            context = own.shorter(context)
        proposal, score = self._path(own, context, most, 1)
        for text, context in self._contexts():
            other, value = self._path(text, context, most, 0)
            if value > score:
                proposal, score = other, value
        return proposal

    def _contexts(self) -> list[tuple[SuffixAutomaton, Context]]:
        """The longest known context in each generation of the past answers."""
        generations = self._corpus.generations if self._corpus else ()
        if [(one, one.size) for one in generations] != [one[:2] for one in self._found]:
            self._found = []
            for text in generations:
                context: Context = (ROOT, 0)
                for token in self._last:
                    context = text.next(context, token)
                self._found.append((text, text.size, context))
        return [(text, context) for text, _, context in self._found]

    def _path(
        self, text: SuffixAutomaton, context: Context, most: int, ends: int
    ) -> tuple[Proposal, float]:
        """The likeliest tokens behind a context and how many of them are expected to hold. `ends`:
        occurrences of the context that nothing follows yet."""
        while text.likeliest(context) == NONE and context[1]:
            context = text.shorter(context)
        matched = context[1]
        if matched < SHORTEST:
            return NOTHING, 0.0
        tokens: list[int] = []
        alive, score = 1.0, 0.0
        while len(tokens) < most and (token := text.likeliest(context)) != NONE:
            seen = text.count(context) - ends
            context = text.next(context, token)
            alive *= min(text.count(context) / seen, 1.0) if seen > 0 else 1.0
            if alive < LEAST:
                break
            score += alive
            tokens.append(token)
            ends = 0
        return (Proposal(tokens, matched, self.name), score) if tokens else (NOTHING, 0.0)
