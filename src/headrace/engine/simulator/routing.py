"""Policies that choose the replica of a request, for the live router and the simulator.

A policy sees a request's prompt and a replica's number and load, and keeps its own state. It uses
no clock and no random numbers: the same calls give the same choices. So a trace of the live router
can be replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

MOST_PREFIXES = 1 << 20
"""Most prefixes of its own choices that a policy remembers; the least recently seen go first."""

SLICE = 1 << 14
"""Prefixes handled at a time when a replica is forgotten: some milliseconds."""


class Prompted(Protocol):
    """A policy's view of a request."""

    @property
    def prefixes(self) -> Sequence[int]:
        """Names of the prefixes of its prompt, the shortest first."""


class Loaded(Protocol):
    """A policy's view of a replica."""

    @property
    def number(self) -> int:
        """Its permanent number among all replicas."""

    @property
    def load(self) -> int:
        """Requests that have not ended, from any sender."""


Place = TypeVar("Place", bound=Loaded)


class Router(Protocol):
    """A policy that chooses a request's replica among the allowed ones (at least one)."""

    def choose(self, request: Prompted, replicas: Sequence[Place]) -> Place: ...


class RoundRobin:
    """Replicas in rotation."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def choose(self, request: Prompted, replicas: Sequence[Place]) -> Place:
        return replicas[next(self._next) % len(replicas)]


class LeastLoaded:
    """The replica with the fewest requests that have not ended; ties are broken in turn.

    Always taking the first gave longer tails: with many idle replicas, the same few got every
    burst.
    """

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: Prompted, replicas: Sequence[Place]) -> Place:
        least = min(replica.load for replica in replicas)
        size = len(replicas)
        self._turn = next(
            place
            for place in ((self._turn + n) % size for n in range(1, size + 1))
            if replicas[place].load == least
        )
        return replicas[self._turn]


class PrefixAffinity:
    """The replica with the longest prefix of the prompt, unless it is overloaded.

    A replica may report its prefixes (`told`); then its report decides. The policy's own choices
    then count only until the working replica has reported them. For a replica without reports, the
    policy remembers its requests. A replica with more than `slack` times the mean load plus two, or
    one that may get nothing now, is replaced by the least loaded one.
    """

    def __init__(self, slack: float = 1.25, most: int = MOST_PREFIXES) -> None:
        self._slack, self._most = slack, most
        self._sent: dict[int, int] = {}
        """Prefix → the replica that it was last sent to and that has not reported it."""
        self._held: dict[int, int | set[int]] = {}
        """Prefix → the replica that holds it, or a set of replicas."""
        self._tells: set[int] = set()
        self._else = LeastLoaded()

    def told(self, replica: int, held: Iterable[int], gone: Iterable[int]) -> None:
        """Take a replica's report of the prefixes that it gained and lost."""
        self._tells.add(replica)
        known, sent = self._held, self._sent
        for key in held:
            holders = known.setdefault(key, replica)
            if isinstance(holders, set):
                holders.add(replica)
            elif holders != replica:
                known[key] = {holders, replica}
            if sent.get(key) == replica:
                del sent[key]
        self._lose(replica, gone)

    def silent(self, replica: int) -> None:
        """Forget the reports of a replica, which no longer sends any."""
        for _ in self.forget(replica):
            pass

    def forget(self, replica: int) -> Iterator[None]:
        """Do as `silent` in steps of `SLICE` names."""
        if replica not in self._tells:
            return
        self._tells.discard(replica)
        names = list(self._held)
        for begin in range(0, len(names), SLICE):
            if begin:
                yield
            self._lose(replica, names[begin : begin + SLICE])

    def _lose(self, replica: int, keys: Iterable[int]) -> None:
        known = self._held
        for key in keys:
            holders = known.get(key, -1)
            if holders == replica:
                del known[key]
            elif isinstance(holders, set):
                holders.discard(replica)
                if not holders:
                    del known[key]

    def choose(self, request: Prompted, replicas: Sequence[Place]) -> Place:
        keys, sent = request.prefixes, self._sent
        chosen = self._where(keys, replicas)
        bound = self._slack * sum(one.load for one in replicas) / len(replicas) + 2
        if chosen is None or chosen.load > bound:
            chosen = self._else.choose(request, replicas)
        number = chosen.number
        for key in keys:
            sent.pop(key, None)  # The most recently used is the youngest.
            if number not in self._holders(key):
                sent[key] = number
        while len(sent) > self._most:
            del sent[next(iter(sent))]
        return chosen

    def _holders(self, key: int) -> Collection[int]:
        """Return the replicas that report holding a prefix."""
        holders = self._held.get(key, ())
        return (holders,) if isinstance(holders, int) else holders

    def _where(self, keys: Sequence[int], replicas: Sequence[Place]) -> Place | None:
        """Return the least loaded of the replicas that have the longest prefix."""
        able: dict[int, Place] | None = None
        for key in reversed(keys):
            holders, last = self._holders(key), self._sent.get(key)
            if not holders and last is None:
                continue
            if able is None:
                able = {one.number: one for one in replicas}
            found = [able[number] for number in holders if number in able]
            if last in able and not (last in self._tells and not able[last].load):
                found.append(able[last])
            if found:
                return min(found, key=lambda one: one.load)
        return None


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixAffinity,
}
