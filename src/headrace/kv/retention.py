"""Cached blocks of a pool, and the choice of the next one to evict.

Each tenant has a list of blocks in the order of their last use. Blocks of a tenant idle for ten
minutes are evicted first. Then the oldest blocks of the tenant that holds most, so that no tenant
pushes out the others. Blocks that a request asked to retain are in lists by priority. They are
evicted when nothing else is cached, the lowest priority first, and are never more than half of the
pool. After their time they are like any others. Nothing is ever locked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

FORGOTTEN = 600.0
"""Seconds of idleness after which a tenant's blocks go before those of others."""
LOOKED_AT = 64
"""Most blocks evicted from one list before the list is chosen again."""


class CachedBlocks:
    """Blocks that are free and in the index."""

    __slots__ = (
        "_clock", "_left", "_lists", "_most", "_places", "_retained", "_seen", "_until", "_victim",
        "count", "tenants",
    )  # fmt: skip

    def __init__(self, total: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._most = total // 2
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.tenants: dict[int, str] = {}
        """The tenant of each block in the index, owned or not."""
        self._lists: dict[str | int, OrderedDict[int, None]] = {}
        """By tenant, or by priority for retained blocks."""
        self._places: dict[int, str | int] = {}
        """Cached block → its list."""
        self._seen: dict[str, float] = {}
        """When a tenant last gave back a block."""
        self._until: dict[int, tuple[float, int]] = {}
        """Block → (time until which it is retained, priority)."""
        self._retained = 0
        self._victim: OrderedDict[int, None] = OrderedDict()
        self._left = 0

    def add(self, block: int) -> None:
        """Add a block that its last owner gave back."""
        place: str | int = self.tenants[block]
        now = self._seen[self.tenants[block]] = self._clock()
        if self._until:
            until, priority = self._until.get(block, (0.0, 0))
            if until > now and self._retained < self._most:
                place = priority
                self._retained += 1
        self._put(block, place)
        self.count += 1

    def remove(self, block: int) -> None:
        """Remove a block that is taken up again or evicted."""
        place = self._places.pop(block)
        del self._lists[place][block]
        self._retained -= isinstance(place, int)
        self.count -= 1

    def retain(self, block: int, until: float, priority: int) -> None:
        """Retain an indexed block, once it is free, for as long as that is possible."""
        self._until[block] = max(self._until.get(block, (0.0, 0)), (until, priority))

    def forget(self, block: int) -> None:
        """Forget a block that left the index."""
        self.tenants.pop(block, None)
        self._until.pop(block, None)

    def oldest(self) -> int:
        """Return the block that is evicted next."""
        assert self.count, "no free block: the caller counts before it takes"
        if not self._left or not self._victim:
            self._victim, self._left = self._choose()
        self._left -= 1
        return next(iter(self._victim))

    def walk(self) -> Iterator[int]:
        """Yield all cached blocks."""
        assert self.count == len(self._places)
        assert self._retained == sum(isinstance(place, int) for place in self._places.values())
        for held in self._lists.values():
            yield from held

    def _put(self, block: int, place: str | int) -> None:
        self._places[block] = place
        self._lists.setdefault(place, OrderedDict())[block] = None

    def _choose(self) -> tuple[OrderedDict[int, None], int]:
        """Choose the list to evict from next, and how many blocks before the next choice."""
        now = self._clock()
        self._expire(now)
        for place in [place for place, held in self._lists.items() if not held]:
            del self._lists[place]
            if isinstance(place, str):
                del self._seen[place]
        tenants = [place for place in self._lists if isinstance(place, str)]
        if not tenants:
            lowest = min(place for place in self._lists if isinstance(place, int))
            return self._lists[lowest], 1
        longest = min(tenants, key=self._seen.__getitem__)
        if now - self._seen[longest] > FORGOTTEN:
            return self._lists[longest], LOOKED_AT
        *_, second, largest = ["", *sorted(tenants, key=lambda tenant: len(self._lists[tenant]))]
        more = len(self._lists[largest]) - len(self._lists.get(second, ()))
        return self._lists[largest], min(LOOKED_AT, more + 1)

    def _expire(self, now: float) -> None:
        """Return blocks whose retention is over to their tenants' lists."""
        over = [
            block
            for place, held in self._lists.items()
            if isinstance(place, int)
            for block in held
            if self._until[block][0] <= now
        ]
        for block in over:
            del self._until[block]
            self.remove(block)
            self._put(block, self.tenants[block])
            self._seen.setdefault(self.tenants[block], now)
            self.count += 1
