"""Slots of the part that drafts: each holds the KV of one sequence whole, or is free.

A sequence runs without a slot where none is free, and gets one when it is left. Drafts never change
an answer, so nothing waits for a slot and nobody is preempted for one. A free slot keeps the name
of its last text: the next turn of a conversation, or the same sequence after a preemption, gets the
slot whose text begins most like its own. Texts of two tenants never do (`PrefixChain.common`).
"""

from __future__ import annotations

from headrace.base.step import SlotWrite

from .prefix import PrefixChain
from .table import BlockTable


class Slots:
    """The slots of one `KvManager`, which alone makes and leaves them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: dict[int, tuple[PrefixChain, int] | None] = dict.fromkeys(range(count))
        """Free slots, the longest unused first, and the known tokens of their last texts."""

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, table: BlockTable, row: int, known: int, writes: list[SlotWrite]) -> None:
        """Give a free slot to the sequence of a row, `known` tokens long, if it has none."""
        if table.slot is not None or not self._free:
            return
        alike = {slot: _alike(table.chain, known, last) for slot, last in self._free.items()}
        slot = max(alike, key=alike.__getitem__)
        del self._free[slot]
        table.slot = slot
        writes.append(SlotWrite(row, slot, alike[slot]))

    def leave(self, table: BlockTable) -> None:
        """Take the slot of a table back, if it has one."""
        if table.slot is not None:
            chain = table.chain
            self._free[table.slot] = None if chain is None else (chain, chain.known)
            table.slot = None

    def reset(self) -> None:
        """Forget all texts."""
        self._free = dict.fromkeys(self._free)

    def check_integrity(self, held: list[int]) -> None:
        """Assert that each slot is free or in one table; `held`: those of all tables."""
        assert sorted([*held, *self._free]) == list(range(self.count))


def _alike(chain: PrefixChain | None, known: int, last: tuple[PrefixChain, int] | None) -> int:
    """Return the number of first tokens that a sequence and a slot's last text have in common."""
    if chain is None or last is None:
        return 0
    other, length = last
    return chain.common(other, min(known, length))
