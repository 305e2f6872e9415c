"""Autoscaling on the simulator: what one replica carries, and rules that follow a burst."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.base.layout import Layout
from headrace.engine.described import make_case
from headrace.engine.sim_replica import ReplicaSpec, SimRequest
from headrace.roofline.hardware import find_hardware

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from replicas import LoadSeen, Scaler, by_demand, by_queue, carried, foreseen, scale

TTFT, PROMPT = 2.0, [2] * 2048


@pytest.fixture(scope="module")
def spec() -> ReplicaSpec:
    device = find_hardware("H200", None)
    case = make_case("llama-3.1-70b", device, layout=Layout(2))
    return ReplicaSpec(case, device, rows=64, max_context=4096, prefix_cache=False)


def evenly(rate: float, begin: float, end: float, name: str) -> list[tuple[float, SimRequest]]:
    return [
        (begin + n / rate, SimRequest(f"{name}{n}", PROMPT, 2))
        for n in range(int(rate * (end - begin)))
    ]


def test_rules() -> None:
    seen = LoadSeen(now=600.0, arrivals=6.0, waiting=60, served=3.0, replicas=3)
    assert by_demand(2.0)(seen) == 3.5
    assert by_demand(2.0, headroom=2.0)(seen) == 7.0
    assert by_queue(10.0)(seen) == 6.0
    assert by_queue(20.5)(seen) == 3.0  # Within the tolerance.
    assert foreseen(lambda at: 8.0 if at > 650 else 2.0, 2.0, 60.0)(seen) == 4.0
    assert foreseen(lambda at: 8.0 if at > 650 else 2.0, 2.0, 15.0)(seen) == 1.0


@pytest.mark.slow
def test_demand_follows_a_burst_and_does_not_flap(spec: ReplicaSpec) -> None:
    capacity = carried(spec, lambda rate: evenly(rate, 0.0, 40.0, "c"), TTFT)
    assert 0.5 < capacity < 20
    calm, busy = 0.5 * capacity, 2.5 * capacity
    load = evenly(calm, 0.0, 120.0, "a") + evenly(busy, 120.0, 360.0, "b")
    load += evenly(calm, 360.0, 900.0, "c")
    scaler = Scaler(by_demand(capacity, 1.25), cold=15.0, least=1, most=8)
    found = scale(spec, scaler, load, TTFT)
    wanted = [count for _, count in scaler.course]
    assert wanted[0] == wanted[-1] == 1
    assert 3 <= max(wanted) <= 6
    assert found.turns <= 1  # Up and down again: the burst is four minutes long.
    assert found.minutes == 15
    fixed = scale(spec, Scaler(lambda _seen: 1.0, 15.0, 1, 8), load, TTFT)
    assert fixed.hours == pytest.approx(0.25, abs=0.01)
    assert fixed.changes == 0
    assert found.violated < fixed.violated
    assert found.late < fixed.late
    assert found.hours < 0.25 * max(wanted)
