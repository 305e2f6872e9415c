"""Distributions of token counts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ..base.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of token counts in low … high.

    fixed: always `a`; uniform: a … b; normal: mean a, deviation b; lognormal: median a, sigma of
    the logarithm b.
    """

    kind: str
    a: float
    b: float = 0.0
    low: int = 1
    high: int = 2**20

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            value = self.a
        elif self.kind == "uniform":
            value = rng.randint(round(self.a), round(self.b))
        elif self.kind == "normal":
            value = rng.gauss(self.a, self.b)
        else:
            value = self.a * math.exp(rng.gauss(0.0, self.b))
        return min(max(round(value), self.low), self.high)


def parse_lengths(text: str, param: str = "tokens") -> Lengths:
    """Parse `128`, `uniform:64:256`, `normal:512:100`, `lognormal:400:0.8`, each with
    `@low-high`."""
    body, _, bounds = text.partition("@")
    kind, *numbers = body.split(":") if ":" in body else ("fixed", body)
    wanted = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2}
    try:
        values = [float(number) for number in numbers]
        low, high = (int(n) for n in bounds.split("-")) if bounds else (1, 2**20)
        good = len(values) == wanted[kind] and values[0] >= 1 and 1 <= low <= high
        if kind == "uniform":
            good = good and values[0] <= values[1]
        if good and all(math.isfinite(v) and 0 <= v <= 2**20 for v in values):
            a, b = (values[0], values[1]) if len(values) == 2 else (values[0], 0.0)
            return Lengths(kind, a, b, low, high)
    except (ValueError, KeyError):
        pass
    raise InvalidRequest(
        f"{param} must be N, uniform:LOW:HIGH, normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA, "
        f"each with an optional @LOW-HIGH, not {text!r}",
        param=param,
    )
