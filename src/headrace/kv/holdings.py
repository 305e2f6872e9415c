"""Which marked beginnings of prompts a pool holds, for whoever routes by it.

A request may bring *marks*: names that others have for the first so many tokens of its prompt
(`base.text_prefixes`). A mark is held while the block with the last of these tokens is in the
index: blocks are given up from the end of a prefix, so those before it are there too, unless one
tenant's blocks were taken in another order; then a router's hint is worse by some blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pool import BlockPool
from .table import BlockTable


class Holdings:
    """Marks of the blocks in one pool's index, and what changed since it was last asked."""

    __slots__ = ("_block_size", "_by_block", "_held", "_news", "_pool")

    def __init__(self, paged: Sequence[tuple[int, int | None, BlockPool]], block_size: int) -> None:
        """`paged`: (group, window, pool); the pool is one whose prefixes have no window, if any."""
        ordered = sorted(paged, key=lambda one: one[1] is not None)
        self._pool = ordered[0][2] if ordered else None
        if self._pool is not None:
            self._pool.on_gone = self.gone
        self._block_size = block_size
        self._by_block: dict[bytes, list[int]] = {}
        self._held: set[int] = set()
        self._news: dict[int, bool] = {}

    def note(self, table: BlockTable) -> None:
        """Take from a chain's marks, whose last is the shortest, those that lie in the full blocks
        that its table has entered."""
        chain, pool = table.chain, self._pool
        if chain is None or pool is None:
            return
        marks, keys = chain.marks, chain.keys
        while marks and (at := (marks[-1][0] - 1) // self._block_size) < table.entered:
            _, mark = marks.pop()
            if mark not in self._held and keys[at] in pool.index:
                self._held.add(mark)
                self._by_block.setdefault(keys[at], []).append(mark)
                self._news[mark] = True

    def gone(self, block: bytes) -> None:
        """A block left the index."""
        for mark in self._by_block.pop(block, ()):
            self._held.discard(mark)
            self._news[mark] = False

    def take(self) -> tuple[list[int], list[int]] | None:
        """(marks that are held now, marks that no longer are) since the last call; None: no news.
        What came and went meanwhile may be told as gone though it was never told as held."""
        if not self._news:
            return None
        news, self._news = self._news, {}
        held = [mark for mark, there in news.items() if there]
        return held, [mark for mark, there in news.items() if not there]
