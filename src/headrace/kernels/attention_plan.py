"""Division of a step's attention among a device's programs, from lengths known on the host.

A grid sized by the longest sequence is mostly programs that exit at once. Each wave of them costs a
microsecond a layer: 256 sequences of 1,000 tokens next to one of 10,000 made 61,000 of them. The
host knows every length and copies to the device once a step anyway, so it lists the work. Entries
of few tokens are cut into *pieces* of the KV, about as many as keep the device busy. The others are
*chunks*, among which the programs of a tile find theirs.

A line holds everything that its kernel would otherwise look up, so it costs a single read. In the
buffers of a graph, lines after a list's end are zero: no work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arrays import Array

PER_MULTIPROCESSOR = 8
"""Pieces times KV heads that each multiprocessor gets in addition to one piece per entry; four of
the eight run at a time."""
PROGRAMS = 132 * PER_MULTIPROCESSOR
"""Pieces times KV heads of a device of unknown size."""
SHORTEST = 128
"""Fewest tokens of a piece: shorter ones are mostly overhead. Cuts fall at multiples of it; it is a
multiple of every tile."""
COLUMNS = 8
"""Numbers per line of either list. A piece: entry, first row, tokens, length, from (in units of
`SHORTEST`), to, number of the piece, pieces of the entry. A chunk: entry, first row, tokens,
length, tokens of preceding chunks."""
_TRIED = 16


@dataclass(slots=True)
class AttentionPlan:
    """The lists of one step, on its device."""

    pieces: list[Array]
    """For each layer group [P, 8] int32; see `COLUMNS`."""
    chunks: Array
    """[C, 8] int32."""
    chunk_tokens: int
    """Most tokens of all chunks together."""
    widest: int
    """Most tokens of an entry that is cut in pieces."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Maker of the attention lists of one model's steps."""

    kv_heads: int
    windows: Sequence[int | None]
    """Window of each layer group."""
    widest: int = 1
    """Most tokens of an entry that is cut into pieces; 0: no entry is."""
    programs: int | None = None
    """Most tokens of an entry that is cut into pieces; 0: none is cut."""

    def most_pieces(self, entries: int) -> int:
        """Return the largest number of lines in a list of pieces."""
        return entries + -(-(self.programs or PROGRAMS) // self.kv_heads)

    def lists(
        self, counts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> list[npt.NDArray[np.int32]]:
        """Return the pieces of each group, and last the chunks, from counts and lengths [B]."""
        rows = counts.cumsum() - counts
        few = np.flatnonzero(counts <= self.widest)
        many = np.flatnonzero(counts > self.widest)
        chunks = np.zeros((len(many), COLUMNS), np.int32)
        for column, values in enumerate((many, rows[many], counts[many], lengths[many])):
            chunks[:, column] = values
        chunks[:, 4] = counts[many].cumsum() - counts[many]
        heads = [few, rows[few], counts[few], lengths[few]]
        return [*(self._pieces(heads, window) for window in self.windows), chunks]

    def plan(self, lists: list[Array], counts: npt.NDArray[np.int64]) -> AttentionPlan:
        """Make the plan from `lists`, already on the step's device."""
        few, many = counts[counts <= self.widest], counts[counts > self.widest]
        return AttentionPlan(
            lists[:-1], lists[-1], int(many.sum()), self.widest if few.max(initial=0) > 1 else 1
        )

    def _pieces(
        self, heads: list[npt.NDArray[np.int64]], window: int | None
    ) -> npt.NDArray[np.int32]:
        entries, _, counts, lengths = heads
        if not len(entries):
            return np.zeros((0, COLUMNS), np.int32)
        begin = np.zeros_like(lengths)
        if window is not None:
            begin = np.maximum(lengths - counts + 1 - window, 0) // SHORTEST * SHORTEST
        reach = lengths - begin
        size = shortest_piece(reach, self.most_pieces(len(entries)))
        parts = -(-reach // size)
        owner = np.repeat(np.arange(len(entries)), parts)
        found = np.empty((len(owner), COLUMNS), np.int32)
        for column, values in enumerate(heads):
            found[:, column] = values[owner]
        number = np.arange(len(owner)) - (parts.cumsum() - parts)[owner]
        low = begin[owner] + number * size
        found[:, 4] = low // SHORTEST
        found[:, 5] = np.minimum(low + size, lengths[owner])
        found[:, 6] = number
        found[:, 7] = parts[owner]
        return found


def shortest_piece(reach: npt.NDArray[np.int64], most: int) -> int:
    """Return the shortest piece size that cuts sequences of `reach` tokens [B] into about `most`
    pieces at most. It is a multiple of `SHORTEST`; `most` is larger than B."""
    total = int(reach.sum())
    # Every sequence wastes less than a piece, so the answer lies between these two.
    low = max(1, -(-total // (most * SHORTEST)))
    high = max(low, -(-total // ((most - len(reach)) * SHORTEST)))
    sizes = np.unique(np.linspace(low, high, _TRIED).astype(np.int64)) * SHORTEST
    fits = (-(-reach[:, None] // sizes)).sum(0) <= most
    return int(sizes[int(fits.argmax())]) if fits.any() else high * SHORTEST
