"""Which marked beginnings of prompts a pool holds, for whoever routes by it.

A request may bring *marks*: names that others have for the first so many tokens of its prompt
(`base.text_prefixes`). A mark is held while the block with the last of these tokens is in the
index: blocks are given up from the end of a prefix, so those before it are there too, unless one
tenant's blocks were taken in another order; then a router's hint is worse by some blocks.

Routers of others want the blocks themselves, with their tokens: where these are `logged`, the news
have them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .pool import BlockPool
from .table import BlockTable


class BlockEvent(NamedTuple):
    """A block came into the index, or left it."""

    key: bytes
    tokens: list[int]
    """What it holds; none: it left."""
    parent: bytes | None = None
    """Key of the block before it."""


class Gains(NamedTuple):
    """What changed."""

    held: list[int]
    gone: list[int]
    """Marks; what came and went meanwhile may be told as gone though it never was as held."""
    blocks: list[BlockEvent]


class Holdings:
    """Marks of the blocks in one pool's index, and what changed since it was last asked."""

    __slots__ = ("_block_size", "_blocks", "_by_block", "_held", "_logged", "_news", "_pool")

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
        self._blocks: list[BlockEvent] = []
        self._logged: set[bytes] | None = None
        """Blocks of which was told that they are in the index; None: blocks are not told."""

    def log_blocks(self) -> None:
        """Tell of blocks from now on, not of marks alone."""
        self._logged = set()

    def note(self, table: BlockTable, upto: int) -> None:
        """A table enters its full blocks below `upto`: they are in the index now. Of the chain's
        marks, whose last is the shortest, those that lie in them are held."""
        chain, pool, size = table.chain, self._pool, self._block_size
        if chain is None or pool is None:
            return
        marks, keys = chain.marks, chain.keys
        while marks and (at := (marks[-1][0] - 1) // size) < upto:
            _, mark = marks.pop()
            if mark not in self._held and keys[at] in pool.index:
                self._held.add(mark)
                self._by_block.setdefault(keys[at], []).append(mark)
                self._news[mark] = True
        logged = self._logged
        if logged is not None:
            for at in range(table.entered, upto):
                tokens = chain.plain(at * size, (at + 1) * size)
                if keys[at] in pool.index and keys[at] not in logged and tokens:
                    logged.add(keys[at])
                    parent = keys[at - 1] if at else None
                    self._blocks.append(BlockEvent(keys[at], tokens, parent))

    def gone(self, block: bytes) -> None:
        """A block left the index."""
        for mark in self._by_block.pop(block, ()):
            self._held.discard(mark)
            self._news[mark] = False
        if self._logged is not None and block in self._logged:
            self._logged.discard(block)
            self._blocks.append(BlockEvent(block, []))

    def take(self) -> Gains | None:
        """What changed since the last call; None: nothing."""
        if not self._news and not self._blocks:
            return None
        news, self._news = self._news, {}
        blocks, self._blocks = self._blocks, []
        held = [mark for mark, there in news.items() if there]
        return Gains(held, [mark for mark, there in news.items() if not there], blocks)
