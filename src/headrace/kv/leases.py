"""Blocks that other engines hold for a while: leases of computed prompts.

    OFFERED ──► LEASED ──► RELEASED      the borrower has what it wanted, or wants nothing more
       │           │
       └───────────┴─────► EXPIRED       nobody renewed it: the borrower, or the way to it, is gone

OFFERED: the prompt is being computed, whose work holds its blocks itself. LEASED: the lease holds
them. A lease lasts `SECONDS` from its begin and from each renewal; none is without an end, so that
whatever becomes of the other side, nothing is held for longer.

Leases change in the engine's thread alone. Other threads renew them, and read their blocks.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from .manager import KvManager
from .prefix import PrefixChain

SECONDS = 2.0
MOST_LENT = 0.5
"""Share of each pool that leases hold at most."""

Name = tuple[bytes, int]
"""(borrower, its number for the lease)"""


class LeaseState(Enum):
    OFFERED = "offered"
    LEASED = "leased"
    RELEASED = "released"
    EXPIRED = "expired"


class LentBlock(NamedTuple):
    block: int
    key: bytes


@dataclass(slots=True)
class Lease:
    until: float
    state: LeaseState = LeaseState.OFFERED
    blocks: dict[tuple[int, int], LentBlock] = field(default_factory=dict)
    """By (group, place in the prompt)."""


class Leases:
    """All leases of one `KvManager`."""

    def __init__(self, kv: KvManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._kv = kv
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[Name, Lease] = {}
        self.held: Counter[tuple[int, int]] = Counter()
        """(group, block) → leases that hold it."""
        self.expired = 0
        """Since the start."""

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, name: Name) -> bool:
        return name in self._leases

    # The engine's thread

    def offer(self, name: Name) -> bool:
        """A prompt is about to be computed. False: there is a lease of that name."""
        if name in self._leases:
            return False
        with self._lock:
            self._leases[name] = Lease(self._clock() + SECONDS)
        return True

    def lend(
        self, name: Name, chain: PrefixChain, first: int, blocks: int
    ) -> list[tuple[int, list[int]]] | None:
        """Hold what a table that opens with the first `blocks` of a chain needs, from block `first`
        on: per group the place in the prompt of the first block that is held, and all of them, up
        to the last. None, and the lease has ended, where the pool has not got all of it any more,
        or leases hold too much."""
        lease, kv = self._leases[name], self._kv
        assert lease.state is LeaseState.OFFERED
        keys, found = chain.extend(blocks), {}
        counts = Counter(group for group, _ in self.held)
        runs: list[tuple[int, list[int]]] = []
        for group, (of, pool) in enumerate(zip(kv.groups, kv.pools, strict=True)):
            # Of states the last, as with a window of two.
            visible = kv.first_visible(2 if of.state else of.window, blocks * kv.block_size)
            runs.append((max(first, visible), []))
            for at in range(runs[-1][0], blocks):
                block = pool.index.get(keys[at])
                counts[group] += 1
                if block is None or counts[group] > MOST_LENT * pool.total:
                    self._end(name, LeaseState.RELEASED)
                    return None
                found[group, at] = LentBlock(block, keys[at])
                runs[-1][1].append(block)
        with self._lock:
            for (group, _), lent in found.items():
                kv.pools[group].share(lent.block)
                self.held[group, lent.block] += 1
            lease.blocks, lease.state = found, LeaseState.LEASED
        return runs

    def release(self, name: Name) -> bool:
        """End a lease; False where there was none: a message may come twice."""
        if name not in self._leases:
            return False
        self._end(name, LeaseState.RELEASED)
        return True

    def expire(self) -> list[Name]:
        """End those that nobody renewed."""
        now = self._clock()
        late = [name for name, lease in self._leases.items() if lease.until < now]
        for name in late:
            self._end(name, LeaseState.EXPIRED)
        self.expired += len(late)
        return late

    def distrust(self) -> list[Name]:
        """End all: what the blocks hold means something else from now on."""
        names = list(self._leases)
        for name in names:
            self._end(name, LeaseState.RELEASED)
        return names

    def _end(self, name: Name, state: LeaseState) -> None:
        with self._lock:
            lease = self._leases.pop(name)
            lease.state = state
            for (group, _), lent in reversed(lease.blocks.items()):
                self._kv.pools[group].give_back(lent.block)
                self.held[group, lent.block] -= 1
                if not self.held[group, lent.block]:
                    del self.held[group, lent.block]
            lease.blocks = {}

    # Any thread

    def renew(self, names: Iterable[Name]) -> None:
        """These are still wanted."""
        until = self._clock() + SECONDS
        with self._lock:
            for name in names:
                if (lease := self._leases.get(name)) is not None:
                    lease.until = until

    def lent(self, name: Name, group: int, places: Sequence[int]) -> list[LentBlock]:
        """The first of a group's blocks at these places of the prompt, up to one that is not lent.
        Who has read them asks again: what is not lent then may have been written over."""
        with self._lock:
            lease = self._leases.get(name)
            blocks = {} if lease is None else lease.blocks
            lent = (blocks.get((group, at)) for at in places)
            return [one for one in itertools.takewhile(bool, lent) if one]
