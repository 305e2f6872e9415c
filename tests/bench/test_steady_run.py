"""Steady state of a simulated load: its window, its verdict, and the most that engines do."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.base.errors import HeadraceError
from headrace.base.layout import Layout
from headrace.bench.material import AnyIds
from headrace.bench.metrics import request_values
from headrace.bench.options import RunOptions
from headrace.bench.report import verdict
from headrace.bench.steady_run import Capacity, document, flood, interval, steady_run
from headrace.bench.virtual import Simulation
from headrace.cli.simulate import command
from headrace.engine.simulator.sim import Cluster
from headrace.engine.simulator.sim_replica import ReplicaSpec, SimRequest
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.weights import WeightBytes

SPEC = ReplicaSpec(
    Case(known("llama-3.1-8b")[0], WeightBytes("fp8")), DEVICES["H200"], rows=32, max_context=2048
)
SHORT = RunOptions(url="simulated", input="uniform:256:768", output="uniform:16:48")


def make(warm: bool) -> Cluster:
    return Cluster(SPEC, 1, warm=warm)


def test_a_warm_cluster_goes_on_where_its_requests_stand() -> None:
    """Each gets exactly the tokens that it lacks, and no prompt is computed again."""
    cluster = Cluster(SPEC, 1, warm=True)
    options = replace(SHORT, input="700", output="40", concurrency=20, requests=20)
    simulation = Simulation(cluster, options, started=20, material=AnyIds())
    simulation.play(lambda: False)
    lacking = sorted(len(one.chunk_ns) for one in simulation.records)
    assert lacking == [40 - int((n + 0.5) / 20 * 40) for n in reversed(range(20))]
    (cold,) = Cluster(SPEC, 1).run([(0.0, SimRequest("a", list(range(2, 702)), 2))])
    first = min(one.chunk_ns[1] for one in simulation.records if len(one.chunk_ns) > 1) / 1e9
    assert first < cold.times[0], "a decode, not twenty prompts"
    assert not cluster.replicas[0].scheduler.has_work
    cluster.replicas[0].scheduler.check_integrity()


def test_only_the_beginning_of_a_warm_cluster_has_no_budget() -> None:
    cluster = Cluster(SPEC, 1, warm=True)
    started = [SimRequest(f"old {n}", [n, *range(1000, 2499)], 20) for n in range(10)]
    coming = [(0.0, SimRequest(f"new {n}", [n, *range(3000, 4499)], 2)) for n in range(10)]
    assert SPEC.step_tokens < 10 * 1500
    answers = cluster.run(coming, started=started)
    firsts = {one.request.id: one.times[0] for one in answers}
    assert len({firsts[f"old {n}"] for n in range(10)}) == 1, "admitted in one step"
    assert len({firsts[f"new {n}"] for n in range(10)}) > 1, "computed in several"
    assert cluster.replicas[0].scheduler.room.units == SPEC.step_tokens


def test_the_most_that_engines_do_is_what_a_longer_flood_does() -> None:
    found = flood(make, SHORT)
    users = 48
    options = replace(SHORT, concurrency=users, requests=1500)
    result, _ = Simulation(make(False), options, material=AnyIds()).run()
    assert found.rate == pytest.approx(result["figures"]["request_throughput"]["value"], rel=0.05)
    assert found.running == pytest.approx(SPEC.rows, rel=0.05), "more users than rows"
    assert found.of(3).rate == 3 * found.rate


def test_the_number_in_work_follows_littles_law() -> None:
    capacity = Capacity(10.0, 100.0, 2.0, 10.0)
    slope = 8 / 99
    for rate in (0.1, 1.0, 5.0, 9.0):
        number = capacity.in_work(rate)
        assert number == pytest.approx(rate * (2.0 + slope * (number - 1)), abs=1)
    assert capacity.in_work(50.0) == 100


def test_the_number_in_work_at_the_start_is_the_one_later() -> None:
    """The window begins in the steady state: no drift of the number in work."""
    capacity = flood(make, SHORT)
    rate = 0.8 * capacity.rate
    found = steady_run(make, replace(SHORT, arrivals=f"poisson:{rate}", requests=1000))
    records = found.simulation.records
    begin, end = found.window.start_ns, found.window.end_ns
    assert begin > 0
    thirds = np.linspace(begin, end, 4)
    inside = [
        sum(max(0, min(b, r.end_ns) - max(a, r.planned_ns)) for r in records) / (b - a)
        for a, b in itertools.pairwise(thirds)
    ]
    assert max(inside) < 1.5 * min(inside)
    assert capacity.in_work(rate) == pytest.approx(np.mean(inside), rel=0.35)


@pytest.mark.parametrize(("load", "said"), [(0.6, "steady"), (1.3, "overloaded")])
def test_a_load_beyond_the_most_has_no_steady_state(load: float, said: str) -> None:
    capacity = flood(make, SHORT)
    options = replace(SHORT, arrivals=f"poisson:{load * capacity.rate}", slo="ttft:p99<2s")
    found = steady_run(make, options)
    assert found.verdict == said
    assert found.met is (said == "steady")
    assert found.load == pytest.approx(load, rel=0.1)
    result = document(found)
    json.dumps(result, allow_nan=False)
    assert ("OVERLOADED" in verdict(result)) is (said == "overloaded")
    rate = result["figures"]["request_throughput"]["value"]
    assert rate == pytest.approx(min(load, 1.0) * capacity.rate, rel=0.1)


def test_the_ramp_is_not_in_the_figures() -> None:
    """A closed loop: its throughput is that of a long run, however short it is."""
    long = steady_run(make, replace(SHORT, concurrency=24, requests=2000))
    short = steady_run(make, replace(SHORT, concurrency=24, requests=100), most=150)
    low, high = long.throughput
    assert (short.throughput[0] + short.throughput[1]) / 2 == pytest.approx(
        (low + high) / 2, rel=0.08
    )
    assert len(short.window.records) < 200


def test_a_window_without_whole_answers_says_the_same_with_fewer_tokens() -> None:
    """The longest answer takes twice the mean time: a window of whole answers waits for it."""

    def wide(warm: bool) -> Cluster:
        return Cluster(replace(SPEC, rows=160), 1, warm=warm)

    options = replace(SHORT, output="lognormal:60:0.4@2-130", requests=100, slo="ttft:p99<9s")
    capacity = flood(wide, options)
    options = replace(options, arrivals=f"poisson:{0.8 * capacity.rate}")
    whole, half = (
        steady_run(wide, options, most=100, stays=0.5, capacity=capacity, whole=one)
        for one in (True, False)
    )
    assert len(half.window.records) >= 100
    for metric, apart in {"ttft": 0.15, "tpot": 0.05, "itl": 0.1}.items():
        values = [
            interval([request_values(metric, one) for one in found.window.records], 99)[1]
            for found in (whole, half)
        ]
        assert values[1] == pytest.approx(values[0], rel=apart)
    unfinished = [one for one in half.window.records if one.tokens < one.asked_tokens]
    assert unfinished
    assert min(one.tokens for one in unfinished) >= 30
    assert half.simulation.cluster.tokens < 0.9 * whole.simulation.cluster.tokens
    assert whole.verdict == half.verdict == "steady"


def test_the_interval_of_a_percentile_holds_it() -> None:
    """In nine of ten samples or more: a jackknife of a 99th percentile."""
    draw, true, held = random.Random(3), -np.log(0.1), 0
    for _ in range(60):
        values = [[draw.expovariate(1.0)] for _ in range(400)]
        low, value, high = interval(values, 90)
        assert low <= value <= high
        held += low <= true <= high
    assert held >= 51
    assert interval([], 99)[1] == float("inf")


def test_the_command_says_by_its_status_whether_an_slo_is_met() -> None:
    flags = ["llama-3.1-8b", "--output", "16", "--input", "64", "-c", "4", "--json"]
    codes = {
        limit: CliRunner().invoke(command, [*flags, "--slo", f"tpot:p99<{limit}"]).exit_code
        for limit in ("1s", "1us")
    }
    assert codes == {"1s": 0, "1us": 3}
    refused = CliRunner().invoke(command, [*flags, "--gateway", "5"])
    assert "needs a unit" in str(refused.exception)


CASES = {
    "8b": (
        replace(SPEC, rows=64, prefix_cache=False),
        replace(SHORT, input="uniform:128:384"),
    ),
    "70b": (
        ReplicaSpec(
            Case(known("llama-3.1-70b")[0], WeightBytes("fp8"), layout=Layout(2)),
            DEVICES["H100"],
            rows=64,
            max_context=4096,
            prefix_cache=False,
        ),
        replace(SHORT, input="lognormal:400:0.4", output="lognormal:30:0.4"),
    ),
}


@cache
def most(name: str) -> Capacity:
    spec, options = CASES[name]
    return flood(lambda warm: Cluster(spec, 1, warm=warm), options)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.75, 0.9, 1.1, 1.3])
@pytest.mark.parametrize("arrivals", ["poisson:{}", "gamma:{}:0.5"])
@pytest.mark.parametrize("name", CASES)
def test_the_verdict_does_not_depend_on_the_length(name: str, arrivals: str, share: float) -> None:
    """Twenty loads, small and large, even and in bursts, below and above the most: wherever 500 and
    5,000 requests decide, they agree."""
    spec, options = CASES[name]
    load = replace(options, arrivals=arrivals.format(share * most(name).rate), slo="ttft:p99<1s")
    told = [
        steady_run(
            lambda warm: Cluster(spec, 1, warm=warm),
            replace(load, requests=count),
            capacity=most(name),
        ).met
        for count in (500, 5000)
    ]
    assert None in told or told[0] == told[1]
    if share < 0.8 or share > 1:
        assert told[0] is (share < 1), "far from the most there is no doubt"


CHANGED = ["llama-3.1-8b", "--arrivals", "poisson:2", "--input", "100", "--output", "20"]
CHANGED += ["--requests", "50", "--hardware", "H100"]


def test_changes_stand_beside_the_load_as_asked() -> None:
    flags = ["--change", "replicas=2", "--change", "kv-dtype=fp8,rows=8", "--json"]
    done = CliRunner().invoke(command, [*CHANGED, *flags])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert list(told["changes"]) == ["replicas=2", "kv-dtype=fp8,rows=8"]
    assert told["changes"]["replicas=2"]["simulation"]["replicas"] == 2
    alone = CliRunner().invoke(command, [*CHANGED, "--replicas", "2", "--json"])
    one, other = told["changes"]["replicas=2"], json.loads(alone.stdout)
    assert {**one, "created": None} == {**other, "created": None}


def test_a_table_has_a_row_for_each_change() -> None:
    done = CliRunner().invoke(command, [*CHANGED, "--change", "speculate=0.7"])
    assert done.exit_code == 0, done.output
    rows = done.stdout.splitlines()
    assert any(row.startswith("as asked") for row in rows)
    assert any(row.startswith("speculate=0.7") for row in rows)


def test_the_question_stands_above_the_answer() -> None:
    done = CliRunner().invoke(command, [*CHANGED, "--replicas", "2"])
    assert done.exit_code == 0, done.output
    first = done.stdout.splitlines()[0]
    assert first.startswith("llama-3.1-8b, fixed 100/20 tokens, poisson:2; 2 × H100, weights ")


@pytest.mark.parametrize("arrivals", ["poisson", "poisson:", "constant:x", "gamma:0:1"])
def test_arrivals_without_a_rate_are_refused(arrivals: str) -> None:
    done = CliRunner().invoke(command, [*CHANGED, "--arrivals", arrivals])
    assert isinstance(done.exception, HeadraceError)
    assert done.exception.param == "arrivals"


def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "none" / "report.html"
    done = CliRunner().invoke(command, [*CHANGED, "--html", str(path)])
    assert isinstance(done.exception, HeadraceError)
    assert done.exception.param == "html"
    assert "req/s" not in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replica=2", "replicas"),
        ("replicas", "kv_dtype=fp8"),
        ("replicas=two", "a number"),
        ("prefix_cache=maybe", "yes or no"),
    ],
)
def test_a_wrong_change_is_refused_by_name(text: str, said: str) -> None:
    done = CliRunner().invoke(command, [*CHANGED, "--change", text])
    assert isinstance(done.exception, HeadraceError)
    assert said in done.exception.message
    assert done.exception.param == "change"
