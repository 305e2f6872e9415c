"""Leases: blocks of computed prompts that other engines hold for a while.

    OFFERED ──► LEASED ──► RELEASED      the borrower has its blocks, or wants nothing more
       │           │
       └───────────┴─────► EXPIRED       not renewed: the borrower, or the way to it, is gone

OFFERED: the prompt is being computed, and its work holds the blocks. LEASED: the lease holds them.
A lease lasts `SECONDS` from its start and from each renewal. Every lease ends, so that nothing is
held longer if the other side disappears.

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
"""Most of each pool that leases hold, as a share."""

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
        """Leases that expired since the start."""

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, name: Name) -> bool:
        return name in self._leases

    # The engine's thread

    def offer(self, name: Name) -> bool:
        """Offer a prompt that is about to be computed. False: there is a lease of that name."""
        if name in self._leases:
            return False
        with self._lock:
            self._leases[name] = Lease(self._clock() + SECONDS)
        return True

    def lend(
        self, name: Name, chain: PrefixChain, first: int, blocks: int
    ) -> list[tuple[int, list[int]]] | None:
        """Hold the blocks of a chain from block `first` on that a table opening with its first
        `blocks` needs.

        Returns per group the place in the prompt of the first block held, and all blocks from there
        to the last. Returns None, and the lease has ended, if the pool lacks one of them or leases
        hold too much.
        """
        lease, kv = self._leases[name], self._kv
        assert lease.state is LeaseState.OFFERED
        keys, found = chain.extend(blocks), {}
        counts = Counter(group for group, _ in self.held)
        runs: list[tuple[int, list[int]]] = []
        for group, (of, pool) in enumerate(zip(kv.groups, kv.pools, strict=True)):
            # States need the last block only, like a window of two tokens.
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
        """End a lease; False if it is unknown: a message may come twice."""
        if name not in self._leases:
            return False
        self._end(name, LeaseState.RELEASED)
        return True

    def expire(self) -> list[Name]:
        """End the leases that were not renewed in time; return their names."""
        now = self._clock()
        late = [name for name, lease in self._leases.items() if lease.until < now]
        for name in late:
            self._end(name, LeaseState.EXPIRED)
        self.expired += len(late)
        return late

    def distrust(self) -> list[Name]:
        """End all leases: the blocks' content is no longer valid. Returns their names."""
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
        """Extend the leases of these names, which are still wanted."""
        until = self._clock() + SECONDS
        with self._lock:
            for name in names:
                if (lease := self._leases.get(name)) is not None:
                    lease.until = until

    def lent(self, name: Name, group: int, places: Sequence[int]) -> list[LentBlock]:
        """Return a group's blocks at these places of the prompt, up to the first that is not lent.
        The caller asks again after reading them: a block that is not lent then may have been
        overwritten."""
        with self._lock:
            lease = self._leases.get(name)
            blocks = {} if lease is None else lease.blocks
            lent = (blocks.get((group, at)) for at in places)
            return [one for one in itertools.takewhile(bool, lent) if one]
