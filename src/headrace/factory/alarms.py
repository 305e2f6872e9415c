"""Alarms: a change of a metric over the runs, told only where a paired re-run confirms it.

Two questions, two methods. Where a series may have changed is a guess that may often be wrong: a
level against the one before it, on the scale of the series' own noise and of how long that noise
lasts. Whether it has is an experiment: pairs of runs of before and after, in an order that chance
draws for each pair. Where both are the same, every exchange of a pair's labels was as likely, so
the share of exchanges with at least this much change is an exact probability (Fisher's
randomisation test), whatever drifts and however the noise is distributed.
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
"""Probability of an alarm by a re-run of what has not changed, at most."""
RECENT = 8
"""Runs of the later level, at most."""
LEAST, BASE = 12, 60
"""Runs of the level before it."""
SCORE = 3.0
SMALLEST = 0.02
"""Relative change that anybody is asked about."""
PAIRS = 10
ANEW = 5
"""Runs from a question to the next one about the same series."""
NAMES = {
    name if part is None else f"{name}_{part}": lower
    for _, name, part, lower in METRICS
    if name != "goodput"
}
"""Metrics of `runs` that are watched: is less better?"""


@dataclass(frozen=True, slots=True)
class Change:
    """A later level that is worse than the one before it."""

    place: int
    """The first run of the later level."""
    ratio: float
    """Later level over earlier one."""
    score: float
    """Its distance in standard errors."""


def find_change(values: Sequence[float], lower_is_better: bool) -> Change | None:
    """The most distinct change for the worse within the last `RECENT` runs; None where none is.

    `values`: positive, oldest first. Scale: the median absolute deviation; runs that drift together
    count for as few as an AR(1) process of their lag-1 correlation makes of them.
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
        # Kendall 1954: a short series shows less of it than there is.
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
    """By how much the variance of a mean grows where each value has so much of the one before."""
    left = 1 - lasting
    return (1 + lasting) / left - 2 * lasting * (1 - lasting**count) / (count * left * left)


def chance(ratios: Sequence[float], lower_is_better: bool) -> float:
    """Probability of at least this much change for the worse where nothing has changed, exact:
    the share of all 2^n exchanges within pairs. `ratios`: after over before, of each pair."""
    logs = np.log(np.asarray(ratios, np.float64)) * (1 if lower_is_better else -1)
    sums = np.zeros(1)
    for value in logs:
        sums = np.concatenate([sums - value, sums + value])
    # The last bits depend on the order of the sum: what is equal shall count as equal.
    return float(np.mean(sums >= logs.sum() - 1e-9 * np.abs(logs).sum()))


def pairs_for(questions: int) -> int:
    """Pairs with which so many metrics can be decided together, and two more."""
    return max(PAIRS, 2 + math.ceil(math.log2(questions / FALSE_ALARMS)))


def run_pairs(
    before: Callable[[int], dict[str, float]],
    after: Callable[[int], dict[str, float]],
    pairs: int,
    draws: random.Random,
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Metrics of both sides of each pair, which of them runs first being drawn anew."""
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
    """A series with a change that nobody has looked at."""

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
    """What a re-run said of a suspect."""

    suspect: Suspect
    ratio: float
    chance: float
    confirmed: bool

    def row(self, when: int) -> dict[str, Any]:
        """The row of `alarms`."""
        one = self.suspect
        return {"ts": when, "what": one.what, "metric": one.metric, "before": one.before,
                "after": one.after, "change": self.ratio, "chance": self.chance,
                "confirmed": self.confirmed}  # fmt: skip


def suspects(lake: Lake) -> Iterator[Suspect]:
    """Changes of the valid runs' metrics, most distinct metric of each series first."""
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
            told = [run for run in runs if (run[2].get(metric) or 0) > 0]
            when, confirmed = last.get((what, metric), (None, False))
            if when is not None and sum(run[0] > when for run in told) < ANEW:
                continue
            if confirmed:  # What was found is the level that later ones are held against.
                told = [run for run in told if run[0] > when]
            change = find_change([run[2][metric] for run in told], lower)
            if change is not None:
                first, later = told[change.place - 1], told[change.place]
                causes = changed(first[3], later[3])
                before, after = first[1] or str(first[0]), later[1] or str(later[0])
                found.append(Suspect(what, metric, change, before, after, causes, told[-1][3]))
        yield from sorted(found, key=lambda one: -one.change.score)


def judge(
    suspected: Sequence[Suspect], pairs: Sequence[tuple[dict[str, float], dict[str, float]]]
) -> list[Judged]:
    """Verdicts of one re-run: however many metrics are asked about, an alarm about what has not
    changed comes with a probability of `FALSE_ALARMS` at most (Bonferroni)."""
    verdicts = []
    for one in suspected:
        sides = [(a.get(one.metric, 0.0), b.get(one.metric, 0.0)) for a, b in pairs]
        ratios = [b / a for a, b in sides if a > 0 and b > 0]
        lower = NAMES[one.metric]
        # A pair that has no value was not drawn away by chance: it counts for no change.
        ratios += [1.0] * (len(pairs) - len(ratios))
        found = chance(ratios, lower)
        ratio = math.exp(sum(map(math.log, ratios)) / len(ratios))
        confirmed = found <= FALSE_ALARMS / len(suspected)
        verdicts.append(Judged(one, ratio, found, confirmed))
    return verdicts
