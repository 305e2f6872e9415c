"""How a step's attention is shared out among programs of a device, from what the host knows.

A grid that is sized by the longest sequence is mostly programs that leave at once, and each wave of
them costs a microsecond a layer: 256 sequences of 1,000 tokens beside one of 10,000 were 61,000 of
them. So the host, which knows every length and copies to the device once a step anyway, lists what
there is to do: for entries of few tokens *pieces* of the KV, about as many as keep the device busy,
whatever the lengths; for the others *chunks*, among which programs of a tile find theirs.

A list has a place for everything that its kernel would otherwise look up, so that it costs one read
and no more. What is behind a list's end in the buffers of a graph is nought: nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .arrays import Array

PROGRAMS = 1056
"""Pieces times KV heads that a device is given beside one of each entry: eight for each of 132
multiprocessors, of which four run at a time."""
SHORTEST = 128
"""Tokens of a piece at least: shorter ones are mostly beginning, end and a part to add. Cuts are at
multiples of it, a multiple of every tile."""
COLUMNS = 8
"""Numbers of a line of either list; a piece's: entry, first row, tokens, length, from (in
`SHORTEST`), to, number of the piece, pieces of the entry; a chunk's: entry, first row, tokens,
length, tokens of chunks before it."""
_TRIED = 16


@dataclass(slots=True)
class AttentionPlan:
    """The lists of one step, on its device."""

    pieces: list[Array]
    """For each layer group [P, 8] int32; see `COLUMNS`."""
    chunks: Array
    """[C, 8] int32."""
    chunk_tokens: int
    """Tokens of all chunks, at most."""
    widest: int
    """Most tokens of an entry that is cut in pieces."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the lists of steps of one model."""

    kv_heads: int
    windows: Sequence[int | None]
    """For each layer group."""
    widest: int = 1
    """Entries of up to so many tokens are cut in pieces; 0: none is."""

    def most_pieces(self, entries: int) -> int:
        """Lines of a list of pieces, at most."""
        return entries + -(-PROGRAMS // self.kv_heads)

    def lists(
        self, counts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> list[npt.NDArray[np.int32]]:
        """counts, lengths [B] → the pieces of each group, and the chunks last."""
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
        """`lists` as they lie on the step's device."""
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
    """The shortest piece by which sequences of `reach` tokens [B] are at most `most`, or nearly: a
    multiple of `SHORTEST`. `most` is larger than B."""
    total = int(reach.sum())
    # Every sequence wastes less than a piece: between these two lies the answer.
    low = max(1, -(-total // (most * SHORTEST)))
    high = max(low, -(-total // ((most - len(reach)) * SHORTEST)))
    sizes = np.unique(np.linspace(low, high, _TRIED).astype(np.int64)) * SHORTEST
    fits = (-(-reach[:, None] // sizes)).sum(0) <= most
    return int(sizes[int(fits.argmax())]) if fits.any() else high * SHORTEST
