"""What a mapping of a model's file keeps in memory: nothing of what is packed, little of tables."""

from __future__ import annotations

from ..arrays import Array, address, mapped
from ..weights import BlockWeight, DenseWeight, Weight
from .library import forget

MOST_ROWS = 256
"""Rows that are read before the pages go back: at 64 KiB for each at most 16 MiB and one step's."""


def give_back(data: Array) -> None:
    """Drop the pages of what is mapped: few will want them again. Other arrays stay."""
    if mapped(data):
        forget(address(data), data.nbytes)


class MappedRows:
    """Gives back the pages of an embedding table that lies in the mapping of the model's file.

    A row is some hundred bytes, but the system maps sixteen pages around each that is touched, so
    that after a few thousand tokens the whole table counts as memory of this process. The page
    cache keeps it either way: to map a row's pages again takes a microsecond or two.
    """

    def __init__(self, weight: Weight) -> None:
        data = weight.data if isinstance(weight, BlockWeight | DenseWeight) else None
        self._data = data if mapped(data) else None
        self._rows = 0

    def read(self, rows: int) -> None:
        """So many rows were read: perhaps it is time."""
        if self._data is None:
            return
        self._rows += rows
        if self._rows >= MOST_ROWS:
            self._rows = 0
            give_back(self._data)
