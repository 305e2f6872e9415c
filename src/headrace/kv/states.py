"""Blocks of the state group: one for each running sequence, and checkpoints of prompts.

A state depends on all tokens of a sequence, and takes the memory of hundreds of them. Each sequence
has one, which advances with it; there is none per block. A later request can begin with a
**checkpoint**, a copy that a step makes on its way at a place that the manager chose:

* at the last block boundary in the prompt, where the same prompt, or the next turn of the same
  conversation, goes on;
* where the other groups' prefix hit ends, if it is longer than any checkpoint: another text
  diverged there (Pan et al. 2024, Marconi), so more will.

A checkpoint is found by the key of the block that it ends, once the step that made it succeeded. A
sequence that finds one takes a copy of it before its first step. The least recently found go first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from headrace.base.step import MOST_KEEPS, BlockCopy, StateKeep, StepPlan
from headrace.base.tiers import KeyedBlock

from .pool import BlockPool
from .table import BlockTable


class StateBlocks:
    """The state group of one `KvManager`, its only caller."""

    def __init__(self, group: int, pool: BlockPool, block_size: int) -> None:
        self.group, self.pool = group, pool
        self._size = block_size
        self._coming: dict[int, list[KeyedBlock]] = {}
        """Per step: checkpoints that it makes."""

    def longest(self, keys: list[bytes], most: int, found: Container[bytes]) -> int:
        """Return the largest block count, at most `most`, after which `found` has a checkpoint."""
        while most and keys[most - 1] not in found:
            most -= 1
        return most

    def open(self, table: BlockTable, known: int, hit: int, paged: int) -> None:
        """Hold the checkpoint after a table's first `hit` blocks, and choose where in its `known`
        tokens to make new ones. `paged`: their blocks that the other groups have."""
        assert table.chain is not None
        if hit:
            table.restores = self.pool.index[table.chain.keys[hit - 1]]
            self.pool.share(table.restores)
        wanted = sorted({paged, max(known - 1, 0) // self._size})[-MOST_KEEPS:]
        table.keeps = tuple(blocks * self._size for blocks in wanted if blocks > hit)

    def restore(self, table: BlockTable, plan: StepPlan) -> None:
        """Have a plan start from the checkpoint that a table just opened has found, if any."""
        source, (target, *_) = table.restores, table.blocks[self.group]
        if source is not None and source != target:
            plan.copies.append(BlockCopy(self.group, source, target))
        self.leave(table)

    def leave(self, table: BlockTable) -> None:
        """Release the checkpoint that a table holds."""
        if table.restores is not None:
            self.pool.give_back(table.restores)
            table.restores = None

    def keep(self, table: BlockTable, row: int, start: int, end: int, plan: StepPlan) -> None:
        """Have a plan copy a table's state at the chosen places, if there are free blocks. The plan
        computes its final tokens start … end."""
        for at in table.keeps:
            if not start < at <= end or table.chain is None:
                continue
            chain, last = table.chain, at // self._size - 1
            key = chain.extend(last + 1)[last]
            if key not in self.pool.index and self.pool.free:
                block = self.pool.take()
                made = KeyedBlock(self.group, block, key, last, chain.tenant, chain.kept_for(last))
                self._coming.setdefault(plan.number, []).append(made)
                plan.keeps.append(StateKeep(row, at, block))
        table.keeps = tuple(at for at in table.keeps if at > end)

    def settle(self, step: int) -> list[KeyedBlock]:
        """Enter the checkpoints of a step that succeeded in the index; return them."""
        made = self._coming.pop(step, [])
        for one in made:
            self.pool.enter(one.key, one.block, one.tenant)
            self.pool.give_back(one.block)
        return made

    def forget(self, step: int) -> None:
        """Drop the checkpoints of a step that failed and of later ones: they are invalid."""
        for number in [number for number in self._coming if number >= step]:
            for one in self._coming.pop(number):
                self.pool.give_back(one.block)

    def reset(self) -> None:
        """Drop all checkpoints that are being copied."""
        self.forget(-1)

    def held(self, tables: Iterable[BlockTable]) -> Iterator[int]:
        """Yield the blocks that steps in flight fill, and the checkpoints that tables will start
        from."""
        yield from (one.block for coming in self._coming.values() for one in coming)
        yield from (table.restores for table in tables if table.restores is not None)
