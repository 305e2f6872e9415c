"""Pool of a worker in a separate process, as seen by a process that moves its blocks."""

from __future__ import annotations

from ..base.step import PoolShape
from .gaps import Gaps
from .kv_tensors import PoolMemory, allocate_kv


class PoolElsewhere:
    """The worker's pages, through the same file. The sender of steps reports in `gaps` when one
    begins."""

    def __init__(self, file: int, pool: PoolShape) -> None:
        """Map the worker's pages; `pool` is the first shape that the worker made."""
        self.gaps = Gaps()
        self.pool_memory = PoolMemory(file)
        self.allocate(pool)

    def allocate(self, pool: PoolShape) -> None:
        """Map the arrays of a pool that the worker has made."""
        self.cache = allocate_kv(pool, "cpu", host=True, memory=self.pool_memory)
