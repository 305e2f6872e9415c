"""Beam search over the paths of a catalogue: one answer that several pieces of work make.

A beam is work like a prompt: all its units are known, they are the request's prompt and a path. So
a level is a set of prompts with a common prefix, which the prefix index shares; a beam computes its
path's last token alone, since its parent left the block before it. The beams of a level need not
fit into one step, nor into all rows: the next ones begin as others end. A level ends when all its
beams have their continuations; the best of all of these, by score, then place, then token, are the
beams of the next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from headrace.base.items import BeamRow, ItemCatalogue
from headrace.base.outputs import Continuations, FoundItems
from headrace.base.request import Request, SequenceDelta
from headrace.base.step import Admission, StepPlan, StepResult
from headrace.kv import KvManager

from .work import Work


class _KeptPath(NamedTuple):
    """A path that is kept, and its node in the trie."""

    score: float
    path: tuple[int, ...]
    node: int


class Search:
    """The beams of one request."""

    def __init__(
        self,
        catalogue: ItemCatalogue,
        request: Request,
        rank: tuple[float, int],
        kv: KvManager,
        most: int,
    ) -> None:
        """`most`: beams that run or wait at a time."""
        assert request.spec.retrieval is not None
        self.catalogue, self.request, self.rank, self.kv = catalogue, request, rank, kv
        self.wish, self.number = request.spec.retrieval, rank[1]
        self._most = most
        self.depth = 0
        self._level = [_KeptPath(0.0, (), 0)]
        self._coming = deque([0])
        """Places of beams that have not begun."""
        self._open = 0
        """Beams that have begun and not ended."""
        self._found: list[tuple[float, int, int]] = []
        """(minus the score, place, token) of continuations."""
        self.root = kv.chain(request, request.prompt)
        if self.root is not None:
            self.root.extend(len(request.prompt) // kv.block_size)
        self.first: BeamWork | None = None
        self.preemptions = 0

    @property
    def last(self) -> bool:
        """Whether the level's continuations are items."""
        return self.depth + 1 == self.catalogue.levels

    def begin(self, order: int) -> list[BeamWork]:
        """Return the beams that begin now, numbered from `order`."""
        made: list[BeamWork] = []
        while self._coming and self._open < self._most:
            place = self._coming.popleft()
            made.append(BeamWork(order + len(made), self, place, self._level[place]))
            self._open += 1
        self.first = self.first or made[0]
        return made

    def end(self, beam: BeamWork, found: Continuations) -> FoundItems | None:
        """Take a beam's continuations; return the answer if nothing is left to compute."""
        self._open -= 1
        self.preemptions += beam.preemptions
        self._found += [
            (-score, beam.place, token)
            for token, score in zip(found.tokens, found.scores, strict=True)
        ]
        ends = not self._open and not self._coming
        if ends or len(self._found) > 8 * self.wish.beams:
            self._found.sort()
            del self._found[self.wish.beams :]
        if not ends:
            return None
        self._level = [self._below(*one) for one in self._found]
        self._found, self.depth = [], self.depth + 1
        if self._level and self.depth < self.catalogue.levels:
            self._coming.extend(range(len(self._level)))
            return None
        best = self._level[: self.wish.items]
        return FoundItems([one.node for one in best], [one.score for one in best])

    def _below(self, negative: float, place: int, token: int) -> _KeptPath:
        above = self._level[place]
        below = self.catalogue.child(self.depth, above.node, token)
        return _KeptPath(-negative, (*above.path, token), below)


class BeamWork(Work):
    """A path of a search, whose continuations are wanted."""

    __slots__ = ("_kept", "place", "search")
    joint = True

    def __init__(self, id: int, search: Search, place: int, kept: _KeptPath) -> None:
        request = search.request
        super().__init__(id, request, 0, len(request.prompt) + len(kept.path), search.rank)
        self.search, self.place, self._kept = search, place, kept
        self.tokens += kept.path
        self.chain = None if search.root is None else search.root.fork(self.tokens)

    def __lt__(self, other: BeamWork) -> bool:
        """Beams of one search have one rank."""
        return self.id < other.id

    def admission(self) -> Admission:
        search, kept = self.search, self._kept
        legal = search.catalogue.after(search.depth, kept.node).tobytes()
        row = BeamRow(search.number, self.place, kept.score, search.wish.beams, legal)
        made = super().admission()
        return replace(made, spec=replace(made.spec, beam=row))

    def further(self, order: int) -> list[Work]:
        return [*self.search.begin(order)]

    def take(
        self, plan: StepPlan, result: StepResult, entry: int, *, grows: bool
    ) -> SequenceDelta | None:
        assert not grows, "all of it was known"
        if not plan.samples[entry]:
            return None
        found = (result.outputs or {})[entry]
        assert isinstance(found, Continuations)
        search = self.search
        if search.last and self.table is not None:
            search.kv.distrust(self.table)  # Nothing continues after an item.
        items = search.end(self, found)
        if items is None:
            return None
        delta = self.end("stop")
        delta.output, delta.preemptions = items, search.preemptions
        if search.first is not None:
            delta.cached, delta.scheduled = search.first.cached, search.first.scheduled_at
        return delta
