"""Alarms: the bound on false ones, which holds whatever the noise is, and how late they come."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.factory.alarms import (
    FALSE_ALARMS,
    PAIRS,
    Change,
    Suspect,
    chance,
    find_change,
    judge,
    pairs_for,
    run_pairs,
    suspects,
)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=8, max_size=9),
    st.booleans(),
    st.sampled_from([1 / 20, FALSE_ALARMS]),
)
def test_of_all_orders_of_equal_builds_few_alarm(
    ratios: list[float], lower: bool, bound: float
) -> None:
    """Any pairs at all: over every draw of who runs first the share of alarms is within the bound,
    exactly, not on average over some noise."""
    logs = np.log(ratios)
    alarms = 0
    for signs in itertools.product((-1, 1), repeat=len(ratios)):
        alarms += chance(list(np.exp(logs * signs)), lower) <= bound
    assert alarms <= bound * 2 ** len(ratios)


def test_chance_is_the_share_of_exchanges() -> None:
    assert chance([1.1] * 10, True) == 2**-10
    assert chance([1.1] * 10, False) == 1.0
    assert chance([0.9] * 10, False) == 2**-10
    assert chance([1.0] * 10, True) == 1.0
    assert chance([1.2, 1.1, 1 / 1.1], True) == 3 / 8
    # Pairs of the fewest that can decide about so many metrics.
    for questions in (1, 3, 7):
        needed = pairs_for(questions)
        assert needed >= PAIRS
        assert 2.0 ** -(needed - 2) <= FALSE_ALARMS / questions


def drifting(runs: int, seed: int, lasting: float, spread: float) -> np.ndarray:
    """A stationary series of an AR(1) process."""
    draws = np.random.default_rng(seed)
    noise = np.zeros(runs + 100)
    steps = draws.normal(0, spread * math.sqrt(1 - lasting**2), runs + 100)
    for at in range(1, runs + 100):
        noise[at] = lasting * noise[at - 1] + steps[at]
    return np.exp(noise[100:])


def runs_until_found(values: np.ndarray, step: float, at: int) -> int | None:
    """Runs from a step to the first guess at it; None beyond 20."""
    later = values * np.where(np.arange(len(values)) >= at, step, 1.0)
    return next((n for n in range(1, 21) if find_change(later[: at + n], True)), None)


@pytest.mark.parametrize("lasting", [0.0, 0.6])
def test_a_step_is_found_within_five_runs(lasting: float) -> None:
    found = [runs_until_found(drifting(61, seed, lasting, 0.01), 1.05, 40) for seed in range(60)]
    quick = [one for one in found if one is not None and one <= 5]
    assert len(quick) >= 57


def test_what_gets_better_is_no_change() -> None:
    values = drifting(60, 1, 0.0, 0.01)
    values[50:] *= 0.9
    assert find_change(values, True) is None
    change = find_change(values, False)
    assert change is not None
    assert change.place >= 50
    assert change.ratio == pytest.approx(0.9, abs=0.02)
    assert find_change(values[:10], True) is None
    assert find_change([1.0] * 60, True) is None


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [0.0, 0.9])
def test_stationary_runs_alarm_at_most_once_in_two_hundred(lasting: float) -> None:
    """The whole way: guesses on drifting runs, each re-run in pairs that drift on."""
    runs = alarms = 0
    for seed in range(20):
        values = drifting(160 + 200 * 2 * PAIRS, seed, lasting, 0.03)
        draws, place = random.Random(seed), 160
        for end in range(40, 160):
            runs += 1
            if find_change(values[:end], True) is None:
                continue
            later = iter(values[place:])
            pairs = run_pairs(
                lambda _n, later=later: {"m": float(next(later))},
                lambda _n, later=later: {"m": float(next(later))},
                PAIRS,
                draws,
            )
            place += 2 * PAIRS
            alarms += chance([b["m"] / a["m"] for a, b in pairs], True) <= FALSE_ALARMS
    assert runs == 2400
    assert alarms <= runs * FALSE_ALARMS


def suspect(metric: str) -> Suspect:
    return Suspect("w", metric, Change(40, 1.05, 9.0), "old", "new", [], {})


def test_a_verdict_on_several_metrics_is_on_all_of_them() -> None:
    asked = [suspect("ttft_p50"), suspect("output_throughput"), suspect("itl_p50")]
    pairs = [
        ({"ttft_p50": 1.0, "output_throughput": 9.0}, {"ttft_p50": 1.05, "output_throughput": 9.9})
    ] * pairs_for(3)
    verdicts = judge(asked, pairs)
    assert [one.confirmed for one in verdicts] == [True, False, False]
    assert verdicts[0].ratio == pytest.approx(1.05)
    assert verdicts[2].chance == 1.0  # It has no value anywhere.
    assert not judge([suspect("ttft_p50")], pairs[:7])[0].confirmed


def test_runs_of_the_store_are_suspected_once(tmp_path: Path) -> None:
    pytest.importorskip("duckdb", reason="duckdb is not installed")
    from headrace.factory.lake import Lake

    lake, values = Lake(tmp_path / "lake"), drifting(60, 3, 0.0, 0.01)
    values[44:] *= 1.08

    def row(number: int) -> dict[str, object]:
        told = {"ttft_p50": float(values[number]), "output_throughput": 100.0, "tpot_p50": None}
        return {
            "ts": (1_795_000_000 + number) * 1_000_000,
            "commit": f"commit{number}",
            "what": "m · here",
            "valid": number != 43,
            "metrics": json.dumps(told),
            "options": json.dumps({"url": "http://127.0.0.1:1", "input": number // 44}),
        }

    lake.take("runs", [row(number) for number in range(47)])
    (found,) = suspects(lake)
    assert (found.metric, found.before, found.after) == ("ttft_p50", "commit42", "commit44")
    assert found.causes == ["input was 0, is 1"]
    verdict = judge([found], [({"ttft_p50": 1.0}, {"ttft_p50": 1.08})] * PAIRS)[0]
    assert verdict.confirmed
    lake.take("alarms", [verdict.row((1_795_000_000 + 46) * 1_000_000)])
    lake.take("runs", [row(number) for number in range(47, 60)])
    assert list(suspects(lake)) == []


@pytest.mark.slow
def test_a_watch_re_runs_and_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers and the bench's own runs, through the command: one slower, then one alike."""
    pytest.importorskip("duckdb", reason="duckdb is not installed")
    from typer.testing import CliRunner

    from headrace.bench.mock import Behaviour, MockServer
    from headrace.bench.options import RunOptions
    from headrace.cli.bench import Measure
    from headrace.cli.factory import command
    from headrace.factory.lake import Lake

    point = Measure.point
    monkeypatch.setattr(  # However busy this machine is.
        Measure, "point", lambda *given: {**point(*given), "valid": True}
    )
    options = RunOptions(requests=4, input="4", output="2", concurrency=4, warmup=0).public()
    values = drifting(46, 3, 0.0, 0.01)
    values[44:] *= 1.5
    rows = [
        {
            "ts": (1_795_000_000 + number) * 1_000_000,
            "commit": f"commit{number}",
            "what": "m · here",
            "valid": True,
            "metrics": json.dumps({"ttft_p50": float(value)}),
            "options": json.dumps(options),
        }
        for number, value in enumerate(values)
    ]
    for late, status, confirmed in ((0.25, 3, True), (0.0, 0, False)):
        folder = tmp_path / f"{late}"
        lake = Lake(folder)
        lake.take("runs", rows)
        words = ["watch", "--into", str(folder)]
        runner = CliRunner()
        told = runner.invoke(command, words)
        assert told.exit_code == 0, told.output
        assert "nobody is told" in told.output
        with (
            MockServer(Behaviour(ttft=0.01, itl=0.001)) as old,
            MockServer(Behaviour(ttft=0.01 + late, itl=0.001)) as new,
        ):
            sides = ["--before", old.url, "--after", new.url, "--json"]
            done = runner.invoke(command, [*words, *sides])
        assert done.exit_code == status, done.output
        with lake.open() as database:
            assert database.execute("SELECT metric, confirmed FROM alarms").fetchall() == [
                ("ttft_p50", confirmed)
            ]
        assert "ttft_p50" not in runner.invoke(command, words).output  # It was asked about.
