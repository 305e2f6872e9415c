"""The marked prefixes of prompts that a pool holds, for prefix-aware routers.

A request may bring *marks*: external names for the first n tokens of its prompt
(`base.text_prefixes`). A mark is held while the block with the last of these tokens is in the
index. Blocks are evicted from the end of a prefix, so the blocks before it are usually there too.
If one tenant's blocks were taken in another order, a router's hint is off by some blocks.

Routers of other projects need the blocks themselves, with their tokens. After `log_blocks`, the
deltas contain them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .pool import BlockPool
from .table import BlockTable


class BlockEvent(NamedTuple):
    """A block that entered the index or left it."""

    key: bytes
    tokens: list[int]
    """The block's tokens; empty if it left the index."""
    parent: bytes | None = None
    """Key of the block before it."""


class Gains(NamedTuple):
    """The changes since the last call."""

    held: list[int]
    gone: list[int]
    """Marks. A mark that came and left between two calls may be in `gone` without ever being in
    `held`."""
    blocks: list[BlockEvent]


class Holdings:
    """Marks of the blocks in one pool's index, and their changes since the last `take`."""

    __slots__ = ("_block_size", "_blocks", "_by_block", "_held", "_logged", "_news", "_pool")

    def __init__(self, paged: Sequence[tuple[int, int | None, BlockPool]], block_size: int) -> None:
        """`paged`: (group, window, pool). Observes a pool without a window, if there is one."""
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
        """Blocks reported as in the index; None: blocks are not reported."""

    def log_blocks(self) -> None:
        """Report blocks from now on, not only marks."""
        self._logged = set()

    def note(self, table: BlockTable, upto: int) -> None:
        """Note that a table enters its full blocks below `upto` into the index. The chain's marks
        in them are held from now on. Marks are sorted; the last one is the shortest."""
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
        """Note that a block left the index."""
        for mark in self._by_block.pop(block, ()):
            self._held.discard(mark)
            self._news[mark] = False
        if self._logged is not None and block in self._logged:
            self._logged.discard(block)
            self._blocks.append(BlockEvent(block, []))

    def take(self) -> Gains | None:
        """Return what changed since the last call, or None if nothing did."""
        if not self._news and not self._blocks:
            return None
        news, self._news = self._news, {}
        blocks, self._blocks = self._blocks, []
        held = [mark for mark, there in news.items() if there]
        return Gains(held, [mark for mark, there in news.items() if not there], blocks)
