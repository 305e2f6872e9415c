"""Links between simulated replicas: KV that several move at a time shares what carries it.

Each replica has one port out and one port in, as fast as its link. A transfer gets an equal share
of both its ports, and the smaller of the two is its speed: what a port has left because a transfer
is slower at its other end stays unused, so crowded links are told a little too slow, never too
fast. With one transfer at a time it is size / bandwidth + latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

DONE = 1e-9
"""Share of a transfer that rounding may leave."""


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way from a replica to another, by their numbers."""

    source: int
    target: int
    size: float
    arrive: Callable[[bool], None]
    """Told whether it came whole: not where one of both ends died."""
    left: float = 0.0
    rate: float = 0.0


class Ports:
    """All transfers of a cluster; `at` calls something at a time."""

    def __init__(
        self,
        bandwidth: float,
        latency: float,
        clock: Callable[[], float],
        at: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """`bandwidth` of a port in bytes/s; `latency` in seconds, from the last byte on."""
        self._bandwidth, self._latency = bandwidth, latency
        self._clock, self._at = clock, at
        self._moving: list[Transfer] = []
        self._since = 0.0
        self._plans = 0
        """A wake-up of an older plan is none: rates have changed since."""

    def send(self, transfer: Transfer) -> None:
        """Begin it now."""
        self._advance()
        transfer.left = transfer.size
        self._moving.append(transfer)
        self._share()

    def seconds(self, size: float) -> float:
        """What so many bytes take alone."""
        return size / self._bandwidth + self._latency

    def drop(self, replica: int) -> None:
        """A replica is gone: transfers from and to it end here."""
        self._advance()
        lost = [one for one in self._moving if replica in (one.source, one.target)]
        self._moving = [one for one in self._moving if one not in lost]
        self._share()
        for one in lost:
            one.arrive(False)

    def _advance(self) -> None:
        now = self._clock()
        for one in self._moving:
            one.left -= one.rate * (now - self._since)
        self._since = now

    def _share(self) -> None:
        """New rates, and a wake-up at the next end."""
        out = Counter(one.source for one in self._moving)
        into = Counter(one.target for one in self._moving)
        for one in self._moving:
            one.rate = self._bandwidth / max(out[one.source], into[one.target])
        self._plans += 1
        if self._moving:
            plan = self._plans
            first = min(one.left / one.rate for one in self._moving)
            self._at(self._since + max(0.0, first), lambda: self._wake(plan))

    def _wake(self, plan: int) -> None:
        if plan != self._plans:
            return
        self._advance()
        ended = [one for one in self._moving if one.left <= DONE * one.size]
        self._moving = [one for one in self._moving if one not in ended]
        for one in ended:
            self._at(self._since + self._latency, partial(one.arrive, True))
        self._share()
