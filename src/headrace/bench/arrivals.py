"""When requests are due: offsets in seconds from the start, all from one seed.

A process yields endless offsets; the run stops it by count or duration. "closed" has no offsets:
the next request is due when an earlier one has ended.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from ..base.errors import InvalidRequest

Arrivals = Callable[[random.Random], Iterator[float]]
"""An arrival process: seconds from the start, never falling."""


def constant(rate: float) -> Arrivals:
    """Make one request every 1 / rate seconds."""
    return lambda _rng: (number / rate for number in itertools.count())


def poisson(rate: float) -> Arrivals:
    """Make independent arrivals: exponential gaps of mean 1 / rate."""
    return _after_gaps(lambda rng: rng.expovariate(rate))


def gamma(rate: float, burstiness: float) -> Arrivals:
    """Make gamma gaps of mean 1 / rate and shape `burstiness`.

    1 is Poisson, below 1 is bursty, above 1 more regular; the gaps' coefficient of variation is
    burstiness ** -0.5.
    """
    return _after_gaps(lambda rng: rng.gammavariate(burstiness, 1 / (rate * burstiness)))


def ramp(first: float, last: float, seconds: float) -> Arrivals:
    """Make Poisson arrivals whose rate changes linearly from `first` to `last`, then stays.

    By time change: the integral of the rate up to each arrival is a unit-rate Poisson process.
    """
    return lambda rng: (ramp_time(first, last, seconds, each) for each in poisson(1.0)(rng))


def ramp_time(first: float, last: float, seconds: float, arrivals: float) -> float:
    """Return the time by which this number of arrivals of a ramp is expected."""
    slope = (last - first) / seconds
    in_ramp = (first + last) / 2 * seconds
    if arrivals >= in_ramp:
        return seconds + (arrivals - in_ramp) / last
    if slope == 0:
        return arrivals / first
    return (math.sqrt(first**2 + 2 * slope * arrivals) - first) / slope


def scheduled(times: Sequence[float], speed: float = 1.0) -> Arrivals:
    """Use the times of a trace, `speed` times faster."""
    return lambda _rng: ((time - times[0]) / speed for time in times)


def _after_gaps(gap: Callable[[random.Random], float]) -> Arrivals:
    def offsets(rng: random.Random) -> Iterator[float]:
        at = 0.0
        while True:
            at += gap(rng)
            yield at

    return offsets


def parse_arrivals(text: str) -> Arrivals:
    """Parse `constant:4`, `poisson:4`, `gamma:4:0.3` or `ramp:1:8:60`; rates per second."""
    kind, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
        if any(value <= 0 for value in values):
            raise ValueError
        if kind == "constant":
            (rate,) = values
            return constant(rate)
        if kind == "poisson":
            (rate,) = values
            return poisson(rate)
        if kind == "gamma":
            rate, burstiness = values
            return gamma(rate, burstiness)
        if kind == "ramp":
            first, last, seconds = values
            return ramp(first, last, seconds)
    except ValueError:
        pass
    raise InvalidRequest(
        "arrivals must be constant:RATE, poisson:RATE, gamma:RATE:BURSTINESS or "
        f"ramp:FIRST:LAST:SECONDS with positive numbers, not {text!r}",
        param="arrivals",
    )
