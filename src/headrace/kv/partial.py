"""Blocks of which a prefix hit takes only the first tokens.

Two prompts that part inside a block share what is before that; a prompt all of which is known
still has its last token to compute, since something must produce the next; and a sequence that
ends leaves its last block half full, where the next turn of a conversation goes on. Such a block is
copied, and its owner computes on behind the tokens that are right: what lies behind a position is
in no bit of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_ASKED = 8
"""Blocks with the same beginning that one search compares, the newest first."""


class PartialBlocks:
    """Tokens of the blocks in an index, by the key of what is before them. An entry whose key has
    left the index is found to be so when it is looked at, or when too many have gathered."""

    def __init__(self, most: int, there: Callable[[bytes], bool]) -> None:
        """`most`: entries that are kept at least; `there`: is a block with this key in every group,
        and its content computed?"""
        self._most = most
        self._there = there
        self._after: dict[bytes, dict[bytes, list[int]]] = {}
        self._count = 0

    def add(self, before: bytes, key: bytes, tokens: list[int]) -> None:
        """The block `key` holds `tokens`, behind the prefix `before`."""
        held = self._after.setdefault(before, {})
        self._count += key not in held
        held[key] = tokens
        if self._count > 2 * self._most + 64:
            self._tidy()

    def best(self, before: bytes, wanted: Sequence[int]) -> tuple[bytes, int]:
        """(key, tokens) of the block that begins with the most of `wanted`; 0 tokens: there is
        none."""
        key, most = b"", 0
        for other, tokens in list(self._after.get(before, {}).items())[: -MOST_ASKED - 1 : -1]:
            if tokens[: most + 1] == wanted[: most + 1] and self._there(other):
                key, most = other, _agree(tokens, wanted)
        return key, most

    def clear(self) -> None:
        self._after.clear()
        self._count = 0

    def _tidy(self) -> None:
        for before, held in list(self._after.items()):
            kept = {key: tokens for key, tokens in held.items() if self._there(key)}
            if kept:
                self._after[before] = kept
            else:
                del self._after[before]
        self._count = sum(map(len, self._after.values()))


def _agree(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return at
    return min(len(one), len(other))
