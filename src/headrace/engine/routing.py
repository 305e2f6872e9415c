"""Which replica gets a request: the policies of the live router and of the simulator.

A policy sees of a request its prompt and of a replica its number and its load, and keeps whatever
else it goes by. It knows no clock and draws nothing: the same calls give the same choices, so that
a trace of the live router can be decided again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

MOST_PREFIXES = 1 << 20
"""Prefixes that a policy remembers; the ones that were seen least recently go first."""


class Prompted(Protocol):
    """What a policy sees of a request."""

    @property
    def prompt(self) -> Sequence[int]:
        """Token ids in the simulator; eight bytes of text a number in the live router."""


class Loaded(Protocol):
    """What a policy sees of a replica."""

    @property
    def number(self) -> int:
        """Its name among all replicas, which it keeps while others come and go."""

    @property
    def outstanding(self) -> int:
        """Requests that have not ended."""


Place = TypeVar("Place", bound=Loaded)


class Router(Protocol):
    """Chooses the replica of a request among those that may get it (at least one)."""

    def choose(self, request: Prompted, replicas: Sequence[Place]) -> Place: ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def choose(self, request: Prompted, replicas: Sequence[Place]) -> Place:
        return replicas[next(self._next) % len(replicas)]


class LeastLoaded:
    """Fewest requests that have not ended; equals take turns.

    Always taking the first of equals gave longer tails: at a load where many are idle it is the
    same few that get every burst.
    """

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: Prompted, replicas: Sequence[Place]) -> Place:
        least = min(replica.outstanding for replica in replicas)
        size = len(replicas)
        self._turn = next(
            place
            for place in ((self._turn + n) % size for n in range(1, size + 1))
            if replicas[place].outstanding == least
        )
        return replicas[self._turn]


class PrefixAffinity:
    """Where the longest prefix went before, unless that replica has too much to do.

    Remembers, per chained hash of every `grain` numbers of the prompt, the replica that got it
    last, by its number. A replica with more than `slack` times the mean load (and two more) is
    passed over for the least loaded one, and so is one that may get nothing now.
    """

    def __init__(self, grain: int = 128, slack: float = 1.25, most: int = MOST_PREFIXES) -> None:
        self._grain, self._slack, self._most = grain, slack, most
        self._seen: dict[int, int] = {}
        self._else = LeastLoaded()

    def choose(self, request: Prompted, replicas: Sequence[Place]) -> Place:
        prompt, grain, seen = request.prompt, self._grain, self._seen
        keys, key = [], 0
        for end in range(grain, len(prompt) + 1, grain):
            key = hash((key, tuple(prompt[end - grain : end])))
            keys.append(key)
        known = next((seen[key] for key in reversed(keys) if key in seen), None)
        chosen = next((one for one in replicas if one.number == known), None)
        bound = self._slack * sum(one.outstanding for one in replicas) / len(replicas) + 2
        if chosen is None or chosen.outstanding > bound:
            chosen = self._else.choose(request, replicas)
        for key in keys:
            seen.pop(key, None)  # What is used again is the youngest.
            seen[key] = chosen.number
        while len(seen) > self._most:
            del seen[next(iter(seen))]
        return chosen


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixAffinity,
}
