"""Links between simulated replicas: concurrent transfers of KV share their bandwidth.

Each replica has one port out and one port in, as fast as its link. A transfer gets an equal share
of both its ports; the smaller share is its speed, and the rest of the larger one stays unused. So
crowded links appear a little too slow, never too fast. A single transfer takes size / bandwidth +
latency.
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
    """Bytes on their way between two replicas, by number."""

    source: int
    target: int
    size: float
    arrive: Callable[[bool], None]
    """Callback with whether it arrived: False if either end died."""
    left: float = 0.0
    rate: float = 0.0


class Ports:
    """All transfers of a cluster; `at` schedules a call at a time."""

    def __init__(
        self,
        bandwidth: float,
        latency: float,
        clock: Callable[[], float],
        at: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """`bandwidth` of a port in bytes/s; `latency` in seconds, after the last byte."""
        self._bandwidth, self._latency = bandwidth, latency
        self._clock, self._at = clock, at
        self._moving: list[Transfer] = []
        self._since = 0.0
        self._plans = 0
        """Number of plans. A wake-up of an older plan is ignored, since rates have changed."""

    def send(self, transfer: Transfer) -> None:
        """Begin a transfer now."""
        self._advance()
        transfer.left = transfer.size
        self._moving.append(transfer)
        self._share()

    def seconds(self, size: float) -> float:
        """Return the seconds that `size` bytes take alone."""
        return size / self._bandwidth + self._latency

    def drop(self, replica: int) -> None:
        """End all transfers from and to a replica that is gone."""
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
        """Compute new rates, and schedule a wake-up at the next end."""
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
