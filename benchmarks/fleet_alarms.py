"""Alarms: guesses and alarms on stationary runs, delay of a 5 % step, on noise of several kinds.

Run: `python benchmarks/fleet_alarms.py [SERIES]`; the result is `results/fleet_alarms.json`. The
recorded noise is of this machine, now: the time of one fixed product, over and over.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headrace.base.hardware import cpu
from headrace.factory.alarms import FALSE_ALARMS, PAIRS, chance, find_change

HISTORY, STATIONARY, STEP = 40, 200, 1.05
SAMPLES, PRODUCTS = 1_500, 12


def recorded() -> np.ndarray:
    """Seconds of a run of fixed work on this machine, one after the other."""
    draws = np.random.default_rng(0)
    a, b = draws.normal(size=(2, 384, 384))
    found = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        for _ in range(PRODUCTS):
            a @ b
        found.append(time.perf_counter() - begin)
    return np.array(found)


def autoregressive(lasting: float, spread: float) -> Iterator[float]:
    draws, value = random.Random(f"{lasting}{spread}"), 0.0
    while True:
        value = lasting * value + draws.gauss(0, spread * math.sqrt(1 - lasting**2))
        yield math.exp(value)


def bursts() -> Iterator[float]:
    """A quiet machine whose neighbours come and go: 15 % slower for twenty runs in a hundred."""
    draws, busy = random.Random(1), False
    while True:
        busy = draws.random() < (0.95 if busy else 0.0125)
        yield math.exp(draws.gauss(0, 0.01)) * (1.15 if busy else 1.0)


def replayed(samples: np.ndarray) -> Iterator[float]:
    """The record from a place drawn by chance, then from another one, in stretches of 400."""
    draws = random.Random(2)
    while True:
        begin = draws.randrange(len(samples) - 400)
        yield from samples[begin : begin + 400]


def judged(noise: Iterator[float], draws: random.Random, step: float) -> bool:
    """One re-run in pairs."""
    ratios = []
    for _ in range(PAIRS):
        first, second = next(noise), next(noise)
        ratios.append(step * (second / first if draws.random() < 0.5 else first / second))
    return chance(ratios, True) <= FALSE_ALARMS


def measure(noise: Iterator[float], series: int) -> dict[str, float]:
    """Guesses, alarms, and what became of a step, of so many series."""
    draws = random.Random(0)
    runs = guesses = alarms = 0
    delays: list[int] = []
    missed = confirmed = 0
    for _ in range(series):
        values = [next(noise) for _ in range(HISTORY + STATIONARY)]
        for end in range(HISTORY + 1, HISTORY + STATIONARY + 1):
            runs += 1
            if find_change(values[:end], True) is not None:
                guesses += 1
                alarms += judged(noise, draws, 1.0)
        before = [next(noise) for _ in range(HISTORY)]
        for delay in range(1, 21):
            before.append(next(noise) * STEP)
            if find_change(before, True) is not None:
                delays.append(delay)
                confirmed += judged(noise, draws, STEP)
                break
        else:
            missed += 1
    return {
        "stationary_runs": runs,
        "guesses": guesses,
        "alarms": alarms,
        "alarms_a_run": alarms / runs,
        "alarms_a_guess": alarms / guesses if guesses else 0.0,
        "steps": series,
        "steps_found": len(delays),
        "within_5_runs": sum(one <= 5 for one in delays) / series,
        "delay_median": float(np.median(delays)) if delays else None,
        "delay_p90": float(np.percentile(delays, 90)) if delays else None,
        "confirmed_of_found": confirmed / len(delays) if delays else None,
    }


def main(series: int) -> None:
    samples = recorded()
    logs = np.log(samples / np.median(samples))
    kinds = {
        "white, 1 %": autoregressive(0.0, 0.01),
        "white, 3 %": autoregressive(0.0, 0.03),
        "AR(1) 0.6, 1 %": autoregressive(0.6, 0.01),
        "AR(1) 0.9, 3 %": autoregressive(0.9, 0.03),
        "bursts of 15 %": bursts(),
        "recorded here": replayed(samples),
    }
    found = {name: measure(noise, series) for name, noise in kinds.items()}
    result = {
        "noise": found,
        "recorded": {
            "samples": SAMPLES,
            "median_seconds": float(np.median(samples)),
            "spread": float(np.std(logs)),
            "lag_1": float(np.corrcoef(logs[1:], logs[:-1])[0, 1]),
            "lag_10": float(np.corrcoef(logs[10:], logs[:-10])[0, 1]),
        },
        "cpu": cpu().name,
        "load": os.getloadavg()[0],
    }
    place = Path(__file__).parent / "results" / "fleet_alarms.json"
    place.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
