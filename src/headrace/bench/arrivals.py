"""When requests are due: offsets in seconds from the start, all from one seed.

A process gives an endless stream of offsets; the run ends it by count or duration. "closed" has no
offsets: the next request is due when an earlier one is done.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..base.errors import InvalidRequest


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def name(self) -> str: ...

    def offsets(self, rng: random.Random) -> Iterator[float]:
        """Seconds from the start, never falling."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every 1 / rate seconds."""

    rate: float
    name: str = "constant"

    def offsets(self, rng: random.Random) -> Iterator[float]:
        number = 0
        while True:
            yield number / self.rate
            number += 1


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals: exponential gaps of mean 1 / rate."""

    rate: float
    name: str = "poisson"

    def offsets(self, rng: random.Random) -> Iterator[float]:
        at = 0.0
        while True:
            at += rng.expovariate(self.rate)
            yield at


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma gaps of mean 1 / rate and shape `burstiness`.

    1 is Poisson, below 1 comes in bursts, above 1 is more regular; the gaps' coefficient of
    variation is burstiness ** -0.5.
    """

    rate: float
    burstiness: float
    name: str = "gamma"

    def offsets(self, rng: random.Random) -> Iterator[float]:
        at = 0.0
        while True:
            at += rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
            yield at


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson whose rate goes linearly from `first` to `last` over `seconds`, then stays.

    By time change: the integral of the rate up to each arrival is a unit-rate Poisson process.
    """

    first: float
    last: float
    seconds: float
    name: str = "ramp"

    def offsets(self, rng: random.Random) -> Iterator[float]:
        total = 0.0
        while True:
            total += rng.expovariate(1.0)
            yield self.at(total)

    def at(self, arrivals: float) -> float:
        """Time at which so many arrivals are expected."""
        slope = (self.last - self.first) / self.seconds
        in_ramp = (self.first + self.last) / 2 * self.seconds
        if arrivals >= in_ramp:
            return self.seconds + (arrivals - in_ramp) / self.last
        if slope == 0:
            return arrivals / self.first
        return (math.sqrt(self.first**2 + 2 * slope * arrivals) - self.first) / slope


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The times of a trace, `speed` times faster."""

    times: Sequence[float]
    speed: float = 1.0
    name: str = "trace"

    def offsets(self, rng: random.Random) -> Iterator[float]:
        first = self.times[0] if self.times else 0.0
        for time in self.times:
            yield (time - first) / self.speed


def parse_arrivals(text: str) -> Arrivals:
    """`constant:4`, `poisson:4`, `gamma:4:0.3`, `ramp:1:8:60`: rates in requests a second."""
    kind, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
        if any(value <= 0 for value in values):
            raise ValueError
        if kind == "constant":
            (rate,) = values
            return Constant(rate)
        if kind == "poisson":
            (rate,) = values
            return Poisson(rate)
        if kind == "gamma":
            rate, burstiness = values
            return Gamma(rate, burstiness)
        if kind == "ramp":
            first, last, seconds = values
            return Ramp(first, last, seconds)
    except ValueError:
        pass
    raise InvalidRequest(
        "arrivals must be constant:RATE, poisson:RATE, gamma:RATE:BURSTINESS or "
        f"ramp:FIRST:LAST:SECONDS with positive numbers, not {text!r}",
        param="arrivals",
    )
