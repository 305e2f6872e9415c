"""Several tiers as one, the nearest first."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

Bytes = bytes | memoryview
LENT = 2
"""Rank of blocks that prefill servers lend."""


class Known(Protocol):
    """Operations common to all tiers. Called from several threads."""

    @property
    def rank(self) -> int:
        """Rank: 0 a disk of this machine, 1 a store that machines share, `LENT` a prefill
        server."""

    def exists(self, group: int) -> Container[bytes]:
        """Return the keys that are there, as far as is known without waiting."""

    def drop(self, key: bytes, group: int, tenant: str) -> None: ...
    def forget(self) -> None: ...


class Tier(Known, Protocol):
    """Interface to a place that keeps blocks by key."""

    nbytes: int

    def read(self, key: bytes, group: int, tenant: str, size: int, age: int) -> Bytes | None:
        """Return the block's `size` bytes, valid until the same thread reads again, or None.

        None if there is no such block that can be trusted; a damaged block is removed.
        """

    def write(
        self, key: bytes, group: int, tenant: str, parts: Sequence[memoryview], age: int
    ) -> bool: ...
    def expect(self, key: bytes, group: int, tenant: str) -> None:
        """Note that a block will be read soon."""

    def look(self, *, again: bool = False) -> None: ...


class AskedTier(Tier, Protocol):
    """A tier that knows its content only by asking."""

    @property
    def answers(self) -> bool:
        """Tell whether asking is worthwhile now."""

    def seek(self, wanted: Sequence[tuple[bytes, int, str]]) -> list[bool]: ...


class Stack:
    """Tiers in order: reads from the nearest that has a block, writes to all that lack it."""

    def __init__(self, tiers: Sequence[Tier], lent: Sequence[Known] = ()) -> None:
        """Stack the tiers; those of `lent` come after the others and bring their blocks
        themselves."""
        self._kept = list(tiers)
        self.tiers: list[Known] = [*tiers, *lent]
        self._asked: list[AskedTier] = [tier for tier in tiers if hasattr(tier, "seek")]  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        return sum(tier.nbytes for tier in self._kept)

    @property
    def answers(self) -> bool:
        return any(tier.answers for tier in self._asked)

    def exists(self, group: int) -> Container[bytes]:
        return _Any([tier.exists(group) for tier in self.tiers])

    def place(self, group: int, key: bytes) -> int | None:
        ranks = (tier.rank for tier in self.tiers if key in tier.exists(group))
        return next(ranks, None)

    @property
    def keeps(self) -> bool:
        return bool(self._kept)

    @property
    def nearest(self) -> int:
        return self.tiers[0].rank

    def seek(self, wanted: Sequence[tuple[bytes, int, str]]) -> list[bool]:
        found = [False] * len(wanted)
        for tier in self._asked:
            found = [one or other for one, other in zip(found, tier.seek(wanted), strict=True)]
        return found

    def read(self, key: bytes, group: int, tenant: str, size: int, age: int) -> Bytes | None:
        for tier in self._kept:
            if key in tier.exists(group):
                found = tier.read(key, group, tenant, size, age)
                if found is not None:
                    return found
        return None

    def write(
        self, key: bytes, group: int, tenant: str, parts: Sequence[memoryview], age: int
    ) -> bool:
        kept = [
            key in tier.exists(group) or tier.write(key, group, tenant, parts, age)
            for tier in self._kept
        ]
        return any(kept)

    def expect(self, key: bytes, group: int, tenant: str) -> None:
        for tier in self._kept:
            if key in tier.exists(group):
                tier.expect(key, group, tenant)
                return

    def drop(self, key: bytes, group: int, tenant: str) -> None:
        for tier in self.tiers:
            tier.drop(key, group, tenant)

    def look(self, *, again: bool = False) -> None:
        for tier in self._kept:
            tier.look(again=again)

    def forget(self) -> None:
        for tier in self.tiers:
            tier.forget()


class _Any:
    """Union of the keys of several places."""

    __slots__ = ("_places",)

    def __init__(self, places: list[Container[bytes]]) -> None:
        self._places = places

    def __contains__(self, key: object) -> bool:
        return any(key in place for place in self._places)
