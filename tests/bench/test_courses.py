"""Further courses of a simulated run: what its 99th percentiles owe to chance."""

from __future__ import annotations

from dataclasses import replace

from headrace.bench.options import RunOptions
from headrace.bench.virtual import Simulation, bands
from headrace.engine.simulator.sim import Cluster
from headrace.engine.simulator.sim_replica import ReplicaSpec
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES, Loop
from headrace.roofline.known import known
from headrace.roofline.weights import WeightBytes

SPEC = ReplicaSpec(
    Case(known("llama-3.1-8b")[0], WeightBytes("bfloat16")),
    replace(DEVICES["H200"], loop=Loop(0.02)),
    rows=32,
    max_context=4096,
)
OPTIONS = RunOptions(requests=24, concurrency=6, input="600", output="16")


def cluster(course: int) -> Cluster:
    return Cluster(SPEC, 1, course=course)


def percentile(course: int) -> float:
    samples = Simulation(cluster(course), OPTIONS).run()[0]["samples"]
    return float(samples["itl"]["percentiles"]["p99"])


def test_a_course_is_the_same_again_and_unlike_the_next() -> None:
    assert percentile(1) == percentile(1)
    assert len({percentile(course) for course in range(5)}) > 1


def test_the_band_holds_its_courses() -> None:
    found = bands(cluster, OPTIONS, 3)
    each = [percentile(course) for course in (1, 2, 3)]
    assert found["itl"] == (min(each), max(each))
    assert bands(cluster, OPTIONS, 0) == {}


def test_without_a_gateway_nothing_is_left_to_chance() -> None:
    still = replace(SPEC, hardware=replace(SPEC.hardware, loop=Loop(0.0)))
    found = bands(lambda course: Cluster(still, 1, course=course), OPTIONS, 3)
    assert all(low == high for low, high in found.values())
