"""Blocks that a prefix hit takes only in part: their first tokens.

There are three cases. Two prompts that differ inside a block share the tokens before the
difference. A prompt that is cached completely still computes its last token, to produce the next. A
sequence that ends leaves its last block half full, where the next turn of a conversation goes on.
Such a block is copied, and its owner computes on after the valid tokens: the KV up to a position
does not depend on what follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

MOST_ASKED = 8
"""Most blocks with the same beginning that one search compares, the newest first."""


class PartialBlocks:
    """Tokens of the blocks in an index, by the key of the prefix before them. Stale entries are
    dropped lazily: when one is looked up, or when there are too many."""

    def __init__(self, most: int, there: Callable[[bytes], bool]) -> None:
        """`most`: minimum number of entries kept. `there`: returns whether a block with this key is
        in every group, and computed."""
        self._most = most
        self._there = there
        self._after: dict[bytes, dict[bytes, list[int]]] = {}
        self._count = 0

    def add(self, before: bytes, key: bytes, tokens: list[int]) -> None:
        """Note that the block `key` holds `tokens`, after the prefix `before`."""
        held = self._after.setdefault(before, {})
        self._count += key not in held
        held[key] = tokens
        if self._count > 2 * self._most + 64:
            self._tidy()

    def best(self, before: bytes, wanted: Sequence[int]) -> tuple[bytes, int]:
        """Return (key, tokens) of the block that begins with the most of `wanted`; 0 tokens if
        there is none."""
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
    """Return the length of the common prefix."""
    for at, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return at
    return min(len(one), len(other))
