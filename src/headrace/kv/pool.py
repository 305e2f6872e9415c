"""The blocks of one layer group: who owns each, which are free, which can be found again.

A block is in exactly one of three states:

    owned     refs > 0     in one or more block tables; may or may not be in the index
    cached    refs == 0    free, but its content is in the index: may be taken up again
    empty     refs == 0    free, and its content means nothing

Cached and empty blocks stand in one doubly linked list, threaded through two arrays of block
numbers, so that taking the next free block, giving one back and pulling one out of the middle
(a prefix hit on a cached block) are each a few assignments. The list runs from the block to be
taken next to the block to be taken last: empty blocks are put at its head, cached ones at its
tail, which makes eviction least-recently-used without a clock. Block 0 is the null block, never
owned, and therefore free to serve as the list's sentinel.
"""

from __future__ import annotations

from headrace.base.step import NULL_BLOCK


class BlockPool:
    """Blocks 1 … blocks-1 of one group, and the index from content key to block."""

    __slots__ = ("_before", "_next", "free", "index", "keys", "refs", "total")

    def __init__(self, blocks: int) -> None:
        assert blocks >= 1, "the null block is part of every pool"
        self.total = blocks - 1
        """Blocks that can be owned."""
        self.free = 0
        """Cached and empty blocks together."""
        self.refs: list[int] = []
        """Per block: the number of tables it is in."""
        self.keys: list[bytes | None] = []
        """Per block: the key under which the index knows its content."""
        self.index: dict[bytes, int] = {}
        self._next: list[int] = []
        self._before: list[int] = []
        self.reset(blocks)

    def reset(self, blocks: int | None = None) -> None:
        """All blocks empty, in ascending order. Only while none is owned."""
        count = self.total + 1 if blocks is None else blocks
        assert self.free == self.total or not self.refs, "reset while blocks are owned"
        self.refs = [0] * count
        self.keys = [None] * count
        self.index = {}
        self._next = [*range(1, count), NULL_BLOCK]
        self._before = [count - 1, *range(count - 1)]
        self.free = count - 1

    def take(self) -> int:
        """The next free block, owned once and empty; its old content leaves the index."""
        block = self._next[NULL_BLOCK]
        assert block != NULL_BLOCK, "no free block: the caller counts before it takes"
        self._unlink(block)
        key = self.keys[block]
        if key is not None:
            del self.index[key]
            self.keys[block] = None
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner of a block that was found through the index."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def give_back(self, block: int) -> None:
        """One owner less; the last one makes the block cached (tail) or empty (head)."""
        refs = self.refs[block] - 1
        assert refs >= 0, f"block {block} is given back but not owned"
        self.refs[block] = refs
        if refs == 0:
            link, before = self._next, self._before
            if self.keys[block] is None:
                after = link[NULL_BLOCK]
                link[NULL_BLOCK], before[block] = block, NULL_BLOCK
                link[block], before[after] = after, block
            else:
                last = before[NULL_BLOCK]
                before[NULL_BLOCK], link[block] = block, NULL_BLOCK
                before[block], link[last] = last, block
            self.free += 1

    def enter(self, key: bytes, block: int) -> bool:
        """Make an owned block findable. False: this content, or this block, is in the index."""
        assert self.refs[block] > 0
        if self.keys[block] is not None or key in self.index:
            return False
        self.keys[block] = key
        self.index[key] = block
        return True

    def forget(self, block: int) -> None:
        """Take a block out of the index: its content turned out not to be there."""
        key = self.keys[block]
        if key is not None:
            del self.index[key]
            self.keys[block] = None

    def _unlink(self, block: int) -> None:
        after, before = self._next[block], self._before[block]
        self._next[before] = after
        self._before[after] = before
        self.free -= 1

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Assert the invariants; `owners` counts the tables that hold each block."""
        walked = []
        block = self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            assert self._before[self._next[block]] == block, "the list is broken"
            assert self.refs[block] == 0, f"block {block} is free and owned"
            walked.append(block)
            assert len(walked) <= self.total, "the list has a cycle"
            block = self._next[block]
        assert len(walked) == self.free
        owned = sum(1 for refs in self.refs if refs)
        cached = sum(1 for block in walked if self.keys[block] is not None)
        empty = self.free - cached
        assert empty + cached + owned == self.total, (empty, cached, owned, self.total)
        assert self.refs[NULL_BLOCK] == 0
        assert self.keys[NULL_BLOCK] is None
        assert {block: refs for block, refs in enumerate(self.refs) if refs} == owners
        assert all(self.keys[block] == key for key, block in self.index.items())
        assert sum(1 for key in self.keys if key is not None) == len(self.index)
