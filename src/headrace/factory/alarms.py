"""Alarms: a change of a metric over the runs, reported only if a paired re-run confirms it.

There are two steps. A heuristic, which may often be wrong, finds series that may have changed. It
compares a level with the previous one, on the scale of the series' own noise and its
autocorrelation. An experiment then decides: pairs of runs of before and after, in a random order
for each pair. If both are the same, every exchange of a pair's labels is equally likely. The share
of exchanges with at least this much change is then an exact probability (Fisher's randomisation
test), for any drift and any distribution of the noise.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bench.compare import METRICS
from .key import changed
from .lake import Lake

FALSE_ALARMS = 1 / 200
"""Largest probability of a false alarm by a re-run."""
RECENT = 8
"""Most runs of the later level."""
LEAST, BASE = 12, 60
"""Fewest and most runs of the earlier level."""
SCORE = 3.0
SMALLEST = 0.02
"""Smallest relative change that counts."""
PAIRS = 10
ANEW = 5
"""Runs between two re-runs of the same series."""
NAMES = {
    name if part is None else f"{name}_{part}": lower
    for _, name, part, lower in METRICS
    if name != "goodput"
}
"""Watched metrics of `runs`; True if less is better."""


@dataclass(frozen=True, slots=True)
class Change:
    """A later level that is worse than the previous one."""

    place: int
    """The first run of the later level."""
    ratio: float
    """Later level over earlier one."""
    score: float
    """Its distance in standard errors."""


def find_change(values: Sequence[float], lower_is_better: bool) -> Change | None:
    """Find the most distinct change for the worse within the last `RECENT` runs, or None.

    `values`: positive, oldest first. Scale: the median absolute deviation. Correlated runs count
    for fewer, by an AR(1) process with their lag-1 correlation.
    """
    logs = np.log(np.asarray(values, np.float64)) * (1 if lower_is_better else -1)
    best = None
    for count in range(1, min(RECENT, len(logs) - LEAST) + 1):
        base, recent = logs[:-count][-BASE:], logs[-count:]
        level = float(np.median(base))
        rest = base - level
        spread = max(1.4826 * float(np.median(np.abs(rest))), 1e-3)
        rest = np.clip(rest, -3 * spread, 3 * spread)
        power = float(np.mean(rest * rest))
        lasting = float(np.mean(rest[1:] * rest[:-1])) / power if power else 0.0
        # Kendall 1954: a short series underestimates its correlation.
        lasting = min(0.9, max(0.0, lasting + (1 + 4 * lasting) / len(base)))
        error = spread * math.sqrt(
            _shared(count, lasting) / count + 1.57 * _shared(len(base), lasting) / len(base)
        )
        shift = float(np.mean(recent)) - level
        found = Change(
            len(logs) - count, math.exp(shift if lower_is_better else -shift), shift / error
        )
        if shift >= math.log1p(SMALLEST) and found.score >= SCORE:
            best = found if best is None or found.score > best.score else best
    return best


def _shared(count: int, lasting: float) -> float:
    """Return the variance of the mean of `count` values with lag-1 correlation `lasting`, relative
    to independent values."""
    left = 1 - lasting
    return (1 + lasting) / left - 2 * lasting * (1 - lasting**count) / (count * left * left)


def chance(ratios: Sequence[float], lower_is_better: bool) -> float:
    """Return the exact probability of at least this much change for the worse if nothing has
    changed.

    It is the share of all 2^n exchanges within pairs. `ratios`: after over before, of each pair.
    """
    logs = np.log(np.asarray(ratios, np.float64)) * (1 if lower_is_better else -1)
    sums = np.zeros(1)
    for value in logs:
        sums = np.concatenate([sums - value, sums + value])
    # The last bits depend on the order of the sum: equal changes must count as equal.
    return float(np.mean(sums >= logs.sum() - 1e-9 * np.abs(logs).sum()))


def pairs_for(questions: int) -> int:
    """Return the pairs needed to decide this number of metrics together, plus two."""
    return max(PAIRS, 2 + math.ceil(math.log2(questions / FALSE_ALARMS)))


def run_pairs(
    before: Callable[[int], dict[str, float]],
    after: Callable[[int], dict[str, float]],
    pairs: int,
    draws: random.Random,
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Run the pairs, each in a random order; return the metrics of both sides of each."""
    found = []
    for number in range(pairs):
        if draws.random() < 0.5:
            found.append((before(number), after(number)))
        else:
            late = after(number)
            found.append((before(number), late))
    return found


@dataclass(frozen=True, slots=True)
class Suspect:
    """A series with an unjudged change."""

    what: str
    metric: str
    change: Change
    before: str
    """Commit of the last run of the earlier level, or its time."""
    after: str
    causes: list[str]
    """Options that differ between the two runs."""
    options: dict[str, Any]
    """Options of the newest run."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict of a re-run on a suspect."""

    suspect: Suspect
    ratio: float
    chance: float
    confirmed: bool

    def row(self, when: int) -> dict[str, Any]:
        """Return its row of `alarms`."""
        one = self.suspect
        return {"ts": when, "what": one.what, "metric": one.metric, "before": one.before,
                "after": one.after, "change": self.ratio, "chance": self.chance,
                "confirmed": self.confirmed}  # fmt: skip


def suspects(lake: Lake) -> Iterator[Suspect]:
    """Yield the changes of the valid runs' metrics, the most distinct metric of each series
    first."""
    with lake.open() as database:
        rows = database.execute(
            "SELECT what, ts, commit, metrics, options FROM runs WHERE valid ORDER BY what, ts"
        ).fetchall()
        asked = database.execute(
            "SELECT what, metric, max(ts), bool_or(confirmed) FROM alarms GROUP BY ALL"
        ).fetchall()
    last = {(what, metric): (when, confirmed) for what, metric, when, confirmed in asked}
    series: dict[str, list[tuple[Any, ...]]] = {}
    for what, *row in rows:
        series.setdefault(what, []).append((*row[:2], json.loads(row[2]), json.loads(row[3])))
    for what, runs in series.items():
        found = []
        for metric, lower in NAMES.items():
            measured = [run for run in runs if (run[2].get(metric) or 0) > 0]
            when, confirmed = last.get((what, metric), (None, False))
            if when is not None and sum(run[0] > when for run in measured) < ANEW:
                continue
            if confirmed:  # If confirmed, later runs are compared with the changed level.
                measured = [run for run in measured if run[0] > when]
            change = find_change([run[2][metric] for run in measured], lower)
            if change is not None:
                first, later = measured[change.place - 1], measured[change.place]
                causes = changed(first[3], later[3])
                before, after = first[1] or str(first[0]), later[1] or str(later[0])
                found.append(Suspect(what, metric, change, before, after, causes, measured[-1][3]))
        yield from sorted(found, key=lambda one: -one.change.score)


def judge(
    suspected: Sequence[Suspect], pairs: Sequence[tuple[dict[str, float], dict[str, float]]]
) -> list[Judged]:
    """Return the verdicts of one re-run. For any number of metrics, the probability of a false
    alarm is at most `FALSE_ALARMS` (Bonferroni)."""
    verdicts = []
    for one in suspected:
        sides = [(a.get(one.metric, 0.0), b.get(one.metric, 0.0)) for a, b in pairs]
        ratios = [b / a for a, b in sides if a > 0 and b > 0]
        lower = NAMES[one.metric]
        # A missing value is not random, so such a pair counts as no change.
        ratios += [1.0] * (len(pairs) - len(ratios))
        found = chance(ratios, lower)
        ratio = math.exp(sum(map(math.log, ratios)) / len(ratios))
        confirmed = found <= FALSE_ALARMS / len(suspected)
        verdicts.append(Judged(one, ratio, found, confirmed))
    return verdicts
