"""Page release in a model file's mapping, for packed weights and for tables."""

from __future__ import annotations

from ..arrays import Array, address, mapped
from ..weights import BlockWeight, DenseWeight, Weight
from .library import forget

MOST_ROWS = 256
"""Rows read before the pages are released: at 64 KiB each, at most 16 MiB and one step's."""


def give_back(data: Array) -> None:
    """Release the pages of a mapped array, few of which are needed again. Other arrays stay."""
    if mapped(data):
        forget(address(data), data.nbytes)


class MappedRows:
    """Embedding table in the mapping of the model's file, whose pages are released regularly.

    A row is some hundred bytes, but the system maps sixteen pages around each touched one. So after
    a few thousand tokens the whole table counts as memory of this process. The page cache keeps it
    anyway: mapping a row's pages again takes a microsecond or two.
    """

    def __init__(self, weight: Weight) -> None:
        data = weight.data if isinstance(weight, BlockWeight | DenseWeight) else None
        self._data = data if mapped(data) else None
        self._rows = 0

    def read(self, rows: int) -> None:
        """Count the rows that were read; release the pages after `MOST_ROWS`."""
        if self._data is None:
            return
        self._rows += rows
        if self._rows >= MOST_ROWS:
            self._rows = 0
            give_back(self._data)
