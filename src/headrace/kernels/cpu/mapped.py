"""Memory of a model file's mapping: pages of packed weights go back, those of tables mostly."""

from __future__ import annotations

from ..arrays import Array, address, mapped
from ..weights import BlockWeight, DenseWeight, Weight
from .library import forget

MOST_ROWS = 256
"""Rows that are read before the pages go back: at 64 KiB each, at most 16 MiB and one step's."""


def give_back(data: Array) -> None:
    """Drop the pages of a mapped array: few will be wanted again. Other arrays stay."""
    if mapped(data):
        forget(address(data), data.nbytes)


class MappedRows:
    """Embedding table in the mapping of the model's file, whose pages are given back.

    A row is some hundred bytes, but the system maps sixteen pages around each that is touched. So
    after a few thousand tokens the whole table counts as memory of this process. The page cache
    keeps it either way: to map a row's pages again takes a microsecond or two.
    """

    def __init__(self, weight: Weight) -> None:
        data = weight.data if isinstance(weight, BlockWeight | DenseWeight) else None
        self._data = data if mapped(data) else None
        self._rows = 0

    def read(self, rows: int) -> None:
        """Count the rows that were read; give the pages back after `MOST_ROWS`."""
        if self._data is None:
            return
        self._rows += rows
        if self._rows >= MOST_ROWS:
            self._rows = 0
            give_back(self._data)
