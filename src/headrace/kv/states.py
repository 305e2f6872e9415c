"""Blocks of the state group: one for each running sequence, and checkpoints of prompts.

A state follows from all tokens of a sequence, and takes the memory of hundreds of them: there is
one of each sequence, which moves on with it, and none per block. What a later request can begin
with is a **checkpoint**, a copy that a step makes on its way at a place that the manager chose:

* at the last border of blocks in the prompt, where the same prompt, or the next turn of the same
  conversation, goes on;
* where the other groups have blocks for more of the prompt than any checkpoint: somebody else's
  text began alike and went its own way there (Pan et al. 2024, Marconi), so more will.

A checkpoint is found by the key of the block that it ends, once the step that made it succeeded.
Whoever finds one takes a copy of it before its first step. Those that nobody found for longest go
first.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.base.step import MOST_KEEPS, BlockCopy, StateKeep

from .pool import BlockPool


class _Checkpoint(NamedTuple):
    key: bytes
    block: int


class StateBlocks:
    """The state group of one `KvManager`, which alone calls it."""

    def __init__(self, group: int, pool: BlockPool, block_size: int) -> None:
        self.group, self.pool = group, pool
        self._size = block_size
        self._coming: dict[int, list[_Checkpoint]] = {}
        """Per step: checkpoints that it makes."""

    def longest(self, keys: list[bytes], most: int) -> int:
        """The largest number of blocks, up to `most`, behind which there is a checkpoint."""
        while most and keys[most - 1] not in self.pool.index:
            most -= 1
        return most

    def places(self, prompt: int, hit: int, paged: int) -> tuple[int, ...]:
        """Tokens behind which a prompt that begins with `hit` blocks leaves checkpoints; `paged`:
        blocks that the other groups have of it."""
        last = max(prompt - 1, 0) // self._size
        wanted = sorted({paged, last})[-MOST_KEEPS:]
        return tuple(blocks * self._size for blocks in wanted if blocks > hit)

    def restore(self, source: int, target: int, out: list[BlockCopy]) -> None:
        """Begin with the checkpoint `source`, which is held once for that."""
        if source != target:
            out.append(BlockCopy(self.group, source, target))
        self.pool.give_back(source)

    def keep(self, row: int, at: int, key: bytes, step: int, out: list[StateKeep]) -> None:
        """Have a step copy a row's state, where there is a block for it that nobody runs in."""
        if key in self.pool.index or self.pool.free < 1:
            return
        block = self.pool.take()
        self._coming.setdefault(step, []).append(_Checkpoint(key, block))
        out.append(StateKeep(row, at, block))

    def settle(self, step: int) -> None:
        """A step succeeded: its checkpoints can be found."""
        for key, block in self._coming.pop(step, ()):
            self.pool.enter(key, block)
            self.pool.give_back(block)

    def forget(self, step: int) -> None:
        """A step failed: nothing that it and later ones copied means anything."""
        for number in [number for number in self._coming if number >= step]:
            for _, block in self._coming.pop(number):
                self.pool.give_back(block)

    def reset(self) -> None:
        """Nothing that is being copied is to be found."""
        self.forget(-1)

    def owned(self) -> list[int]:
        """Blocks that steps in flight fill."""
        return [block for coming in self._coming.values() for _, block in coming]
