"""The pool of a worker in a process of its own, seen by one that moves its blocks."""

from __future__ import annotations

from ..base.step import PoolShape
from .gaps import Gaps
from .kv_tensors import PoolMemory, allocate_kv


class PoolElsewhere:
    """The same pages by the same file. Who sends the steps says in `gaps` when one begins."""

    def __init__(self, file: int, pool: PoolShape) -> None:
        """`pool`: the first that the worker made."""
        self.gaps = Gaps()
        self.pool_memory = PoolMemory(file)
        self.allocate(pool)

    def allocate(self, pool: PoolShape) -> None:
        """The worker has made these arrays."""
        self.cache = allocate_kv(pool, "cpu", host=True, memory=self.pool_memory)
