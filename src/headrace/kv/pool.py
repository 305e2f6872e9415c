"""The blocks of one layer group: their owners, the free ones, and the index to find them again.

A block is in exactly one of three states:

    owned     refs > 0     in one or more block tables; may or may not be in the index
    cached    refs == 0    free, but its content is in the index: may be taken up again
    empty     refs == 0    free, and its content means nothing

Empty blocks form a doubly linked list, threaded through two arrays of block numbers. Its sentinel
is block 0, which is never owned; blocks are put at its head. `retention` says which cached block is
evicted; within one tenant it is the least recently used one.

Empty blocks are taken before cached ones, with one exception. On a CPU memory is handed out page by
page as it is first written, so a block that was never owned has no memory yet. Such blocks come
last among the empty, in ascending order. One of them is taken only while at most `keep` blocks are
cached. So finished sequences leave `keep` blocks of prefixes cached. The memory of the process
does not grow to the whole pool for prefixes that are never used again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from headrace.base.step import NULL_BLOCK

from .retention import CachedBlocks


class BlockPool:
    """Blocks 1 … blocks-1 of one group, and the index from content key to block."""

    __slots__ = (
        "_before", "_next", "cached_blocks", "free", "index", "keep", "keys", "on_gone", "refs",
        "total", "touched",
    )  # fmt: skip

    def __init__(
        self, blocks: int, keep: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert blocks >= 1, "the null block is part of every pool"
        self.total = blocks - 1
        """Blocks that can be owned."""
        self.keep = self.total if keep is None else keep
        """Cached blocks to keep while blocks that were never owned are left."""
        self.touched = 0
        """The highest block that was ever owned: memory was written up to here."""
        self.cached_blocks = CachedBlocks(self.total, clock)
        self.free = 0
        """Cached and empty blocks together."""
        self.refs: list[int] = []
        """Per block: the number of tables it is in."""
        self.keys: list[bytes | None] = []
        """Per block: the key under which the index knows its content."""
        self.index: dict[bytes, int] = {}
        self.on_gone: Callable[[bytes], None] | None = None
        """Callback that gets the key of each block that leaves the index."""
        self._next: list[int] = []
        self._before: list[int] = []
        self.reset(blocks)

    def reset(self, blocks: int | None = None) -> None:
        """Make all blocks empty, in ascending order. Only while none is owned."""
        count = self.total + 1 if blocks is None else blocks
        assert self.free == self.total or not self.refs, "reset while blocks are owned"
        if self.on_gone is not None:
            for key in self.index:
                self.on_gone(key)
        self.refs = [0] * count
        self.keys = [None] * count
        self.index = {}
        self.cached_blocks.clear()
        # 0 → 1 → … → count - 1 → 0
        self._next = [*range(1, count), NULL_BLOCK]
        self._before = [count - 1, *range(count - 1)]
        self.free, self.touched = count - 1, 0

    @property
    def cached(self) -> int:
        return self.cached_blocks.count

    def take(self) -> int:
        """Take the next free block, owned once and empty; its old content leaves the index."""
        block = self._next[NULL_BLOCK]
        if block == NULL_BLOCK or (block > self.touched and self.cached > self.keep):
            block = self.cached_blocks.oldest()
        elif block > self.touched:
            self.touched = block
        self._unlink(block)
        key = self.keys[block]
        if key is not None:
            self._leave(key, block)
        self.refs[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """Take the blocks that `count` calls of `take` would take."""
        if self.index:
            return [self.take() for _ in range(count)]
        assert count <= self.free, "the caller counts before it takes"
        # Without an index all free blocks are in one list.
        after, refs, taken = self._next, self.refs, []
        block = after[NULL_BLOCK]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            block = after[block]
        after[NULL_BLOCK], self._before[block] = block, NULL_BLOCK
        self.free -= count
        self.touched = max(self.touched, max(taken, default=0))
        return taken

    def fresh(self, count: int) -> range:
        """Return the never-owned blocks among the next `count` that `take` would return now."""
        if self.cached > self.keep:
            return range(0)
        return range(self.touched + 1, min(self.touched + count, self.total) + 1)

    def share(self, block: int) -> None:
        """Add an owner to a block that was found through the index."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def give_back(self, block: int) -> None:
        """Remove an owner; the last one makes the block cached (tail) or empty (head)."""
        self.give_back_many((block,))

    def give_back_many(self, blocks: Iterable[int]) -> None:
        """Remove an owner of each block, in this order (`give_back`)."""
        refs, keys, following, before = self.refs, self.keys, self._next, self._before
        head = following[NULL_BLOCK]
        for block in blocks:
            left = refs[block] = refs[block] - 1
            assert left >= 0, f"block {block} is given back but not owned"
            if left:
                continue
            self.free += 1
            if keys[block] is not None:
                self.cached_blocks.add(block)
                continue
            following[block], before[head] = head, block
            head = block
        following[NULL_BLOCK], before[head] = head, NULL_BLOCK

    def enter(self, key: bytes, block: int, tenant: str = "") -> bool:
        """Make an owned block findable. False: this content, or this block, is in the index
        already."""
        assert self.refs[block] > 0
        if self.keys[block] is not None or key in self.index:
            return False
        self.keys[block] = key
        self.index[key] = block
        self.cached_blocks.tenants[block] = tenant
        return True

    def retain(self, block: int, until: float, priority: int) -> None:
        """Retain an owned, indexed block once it is free, if possible."""
        assert self.refs[block] > 0
        self.cached_blocks.retain(block, until, priority)

    def forget(self, block: int) -> None:
        """Take a block out of the index because its content is not there."""
        key = self.keys[block]
        if key is not None:
            free = self.refs[block] == 0
            if free:
                self._unlink(block)
            self._leave(key, block)
            if free:
                self._insert(block, NULL_BLOCK)
                self.free += 1

    def _leave(self, key: bytes, block: int) -> None:
        """Take a block and its key out of the index."""
        del self.index[key]
        self.keys[block] = None
        self.cached_blocks.forget(block)
        if self.on_gone is not None:
            self.on_gone(key)

    def _insert(self, block: int, before: int) -> None:
        """Link a block into the empty list, after `before`."""
        after = self._next[before]
        self._next[before], self._before[block] = block, before
        self._next[block], self._before[after] = after, block

    def _unlink(self, block: int) -> None:
        """Take a free block out of its list; its key still says which list that is."""
        self.free -= 1
        if self.keys[block] is not None:
            self.cached_blocks.remove(block)
            return
        after, before = self._next[block], self._before[block]
        self._next[before] = after
        self._before[after] = before

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Assert the invariants; `owners` counts the tables that hold each block."""
        walked: list[int] = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            assert self._before[self._next[block]] == block, "the list is broken"
            assert self.keys[block] is None, f"block {block} in the wrong list"
            walked.append(block)
            assert len(walked) <= self.total, "the list has a cycle"
            block = self._next[block]
        for block in self.cached_blocks.walk():
            assert self.keys[block] is not None, f"block {block} in the wrong list"
            walked.append(block)
        assert not any(self.refs[block] for block in walked), "free and owned"
        assert len(walked) == self.free
        touched = [block for block in range(1, self.total + 1) if self.keys[block] is not None]
        touched += [block for block, refs in enumerate(self.refs) if refs]
        assert max(touched, default=0) <= self.touched
        owned = sum(1 for refs in self.refs if refs)
        cached = sum(1 for block in walked if self.keys[block] is not None)
        empty = self.free - cached
        assert cached == self.cached
        assert empty + cached + owned == self.total, (empty, cached, owned, self.total)
        assert self.refs[NULL_BLOCK] == 0
        assert self.keys[NULL_BLOCK] is None
        assert {block: refs for block, refs in enumerate(self.refs) if refs} == owners
        assert all(self.keys[block] == key for key, block in self.index.items())
        assert sum(1 for key in self.keys if key is not None) == len(self.index)
