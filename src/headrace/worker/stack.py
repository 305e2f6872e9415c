"""Several tiers as one, the nearest first."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

Bytes = bytes | memoryview
LENT = 2
"""Rank of what prefill servers lend."""


class Known(Protocol):
    """What there is to know of any tier. Called from several threads."""

    @property
    def rank(self) -> int:
        """0 a disk of this machine, 1 what machines share, `LENT` a prefill server."""

    def exists(self, group: int) -> Container[bytes]:
        """Keys that are there, as far as is known without waiting."""

    def drop(self, key: bytes, group: int, tenant: str) -> None: ...
    def forget(self) -> None: ...


class Tier(Known, Protocol):
    """The seam to anything that keeps blocks by key."""

    nbytes: int

    def read(self, key: bytes, group: int, tenant: str, size: int, age: int) -> Bytes | None:
        """The block's `size` bytes; they stay until the same thread reads again. None where there
        are none that can be trusted; what is wrong is removed."""

    def write(
        self, key: bytes, group: int, tenant: str, parts: Sequence[memoryview], age: int
    ) -> bool: ...
    def expect(self, key: bytes, group: int, tenant: str) -> None:
        """It will be read in a moment."""

    def look(self, *, again: bool = False) -> None: ...


class AskedTier(Tier, Protocol):
    """A tier that says what it has only when it is asked."""

    @property
    def answers(self) -> bool:
        """Is it worth asking now?"""

    def seek(self, wanted: Sequence[tuple[bytes, int, str]]) -> list[bool]: ...


class Stack:
    """Reads from the nearest that has a block, and writes to all that have not."""

    def __init__(self, tiers: Sequence[Tier], lent: Sequence[Known] = ()) -> None:
        """`lent`: what stands behind the others and brings its blocks itself."""
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
    """Keys that one of several places has."""

    __slots__ = ("_places",)

    def __init__(self, places: list[Container[bytes]]) -> None:
        self._places = places

    def __contains__(self, key: object) -> bool:
        return any(key in place for place in self._places)
