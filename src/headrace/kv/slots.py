"""Slots of the part that drafts: each holds the KV of one sequence whole, or is free.

If no slot is free, a sequence runs without one until one is released. Drafts never change an
answer, so no sequence waits or is preempted for a slot. A free slot keeps the prefix chain of its
last text. The next turn of a conversation, or a sequence after preemption, gets the slot with the
longest common prefix. Two tenants never have one (`PrefixChain.common`).
"""

from __future__ import annotations

from headrace.base.step import SlotWrite

from .prefix import PrefixChain
from .table import BlockTable


class Slots:
    """The slots of one `KvManager`, which alone uses them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free: dict[int, tuple[PrefixChain, int] | None] = dict.fromkeys(range(count))
        """Free slots, the longest unused first, with the chains and tokens of their last texts."""

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
    """Return the length of the common prefix of a sequence and a slot's last text."""
    if chain is None or last is None:
        return 0
    other, length = last
    return chain.common(other, min(known, length))
