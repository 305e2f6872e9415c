"""The blocks of one sequence."""

from __future__ import annotations

from .prefix import PrefixChain


class BlockTable:
    """The blocks of one sequence in every group. Made and changed by `KvManager` only."""

    __slots__ = (
        "blocks", "chain", "copied", "entered", "first", "keeps", "restores", "slot",
        "sources",
    )  # fmt: skip

    def __init__(self, groups: int, chain: PrefixChain | None) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.first = [0] * groups
        """Per group: entries below are NULL_BLOCK."""
        self.entered = 0
        """Full blocks below this were offered to the index."""
        self.sources: list[int] = []
        """Per group: the block whose first `copied` tokens begin the table's next block; held until
        the step that copies them has ended."""
        self.copied = 0
        self.chain = chain
        """None: this sequence neither finds nor leaves anything in the index."""
        self.keeps: tuple[int, ...] = ()
        """Token counts after which its state is to be kept for others."""
        self.restores: int | None = None
        """The checkpoint from which its first step starts; held until then."""
        self.slot: int | None = None
        """Its slot of the part that drafts."""
