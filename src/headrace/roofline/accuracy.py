"""Error of predictions, by what was measured or published next to what was predicted.

`accuracy.json` has the rows of `benchmarks/results/published.json` (throughput of one device) and
the ratios of `against_server.json` (latency, the simulator over our server);
`benchmarks/roofline/accuracy.py` writes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from .known import known

FEW = 3
"""Rows from which their worst error stands for others of the kind."""


@dataclass(frozen=True, slots=True)
class Error:
    """Relative error of a predicted number."""

    low: float
    high: float
    """The true number over the predicted one: from 1 - `low` to 1 + `high`, in the worst rows."""
    median: float
    rows: int
    of: str
    """Description of the rows."""

    def around(self, value: float) -> tuple[float, float]:
        return value * (1 - self.low), value * (1 + self.high)

    def __str__(self) -> str:
        return f"-{self.low:.0%} to +{self.high:.0%}"


@cache
def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return found


def throughput_error(model: str, device: str, *, mixture: bool) -> Error:
    """Return the error of predicted throughput and cost: of this model on this device if there are
    rows of it, else of the model, else of its kind (dense or a mixture of experts)."""
    every = _measured()["throughput"]
    name = model.lower()
    kind = [row for row in every if (known(row["model"])[0].moe is not None) is mixture]
    own = [row for row in kind if row["model"] == name]
    here = [row for row in own if row["device"] == device]
    choices = (
        (here, f"{name} on {device}"),
        (own, f"{name} on other devices"),
        (kind, "mixtures of experts" if mixture else "dense models"),
    )
    rows, of = next(one for one in choices if len(one[0]) >= FEW)
    return _error([row["published"] / row["predicted"] for row in rows], f"published rows of {of}")


def latency_error(name: str) -> Error:
    """Return the error of a simulated percentile: `ttft p99`, `itl p50` or `itl p99`."""
    ratios = _measured()["latency"][name]
    return _error([1 / ratio for ratio in ratios], "runs of the simulator against our server")


def _error(truths: list[float], of: str) -> Error:
    return Error(
        max(0.0, 1 - min(truths)),
        max(0.0, max(truths) - 1),
        median(abs(one - 1) for one in truths),
        len(truths),
        of,
    )
