"""Simulated replicas that die, and the links between them."""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.base.errors import OptionError
from headrace.cli.simulate import command
from headrace.engine.loop.draft_law import draft_law
from headrace.engine.simulator.sim import MIGRATIONS, Cluster, Failures
from headrace.engine.simulator.sim_link import Ports, Transfer
from headrace.engine.simulator.sim_replica import Clock, ReplicaSpec, SimAnswer, SimRequest
from headrace.roofline.counts import Case
from headrace.roofline.formats import kv_bytes_of_all
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.weights import WeightBytes

CASE = Case(known("llama-3.1-8b")[0], WeightBytes("fp8"))
SPEC = ReplicaSpec(CASE, DEVICES["H200"], rows=16, max_context=2048, kv_tokens=4096, depth=2)
SPLITS: dict[str, dict[str, Any]] = {
    "none": {},
    "always": {"prefill": 1},
    "pays": {"prefill": 2, "handover": "pays"},
}


def few(seed: int, count: int = 24) -> list[tuple[float, SimRequest]]:
    """Requests of four families, some tens of milliseconds apart."""
    chances, at = random.Random(seed), 0.0
    found = []
    for number in range(count):
        at += chances.expovariate(50)
        prefix = [7 + chances.randrange(4)] * 256
        prompt = prefix + [20 + chances.randrange(9)] * chances.randrange(1, 200)
        found.append((at, SimRequest(str(number), prompt, chances.randrange(1, 40))))
    return found


def played(
    seed: int, split: str, failures: Failures | None, drafts: bool = False
) -> tuple[Cluster, list[SimAnswer]]:
    spec = replace(SPEC, drafts=draft_law("0.6") if drafts else None)
    cluster = Cluster(
        spec, 4, "prefix", told_after=0.05, course=seed, failures=failures, **SPLITS[split]
    )
    return cluster, cluster.run(few(seed))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 2**32),
    st.sampled_from(tuple(SPLITS)),
    st.floats(0.05, 2.0),
    st.floats(0.01, 0.5),
    st.booleans(),
)
def test_every_request_ends_once_with_all_its_tokens(
    seed: int, split: str, between: float, restart: float, drafts: bool
) -> None:
    """Or with an error, where its replicas died too often or none was left."""
    cluster, answers = played(seed, split, Failures(between, restart), drafts)
    assert Counter(one.request.id for one in answers) == dict.fromkeys(map(str, range(24)), 1)
    for one in answers:
        assert one.times == sorted(one.times)
        if one.error is None:
            assert len(one.times) == one.request.output_tokens
            assert one.deaths <= MIGRATIONS
        else:
            assert "died" in one.error or "no server" in one.error
            assert len(one.times) < one.request.output_tokens
    assert sum(one.error is not None for one in answers) == cluster.losses.failed
    for replica in cluster.replicas:
        assert replica.outstanding == 0
        assert not replica.scheduler.has_work
        replica.scheduler.check_integrity()
    again = played(seed, split, Failures(between, restart), drafts)[1]
    assert [(one.request.id, one.times) for one in again] == [
        (one.request.id, one.times) for one in answers
    ]


def test_a_death_costs_a_pause_and_a_cache() -> None:
    """One of two dies in the middle of all answers: those that it had wait, and no one else."""
    requests = [(0.0, SimRequest(str(n), [9 + n] * 512, 200)) for n in range(4)]
    cluster = Cluster(SPEC, 2, "round-robin", failures=Failures(1e6, 0.5))
    cluster._at(0.5, lambda: cluster._die(cluster._groups[0]))
    answers = cluster.run(requests)
    moved = [one for one in answers if one.deaths]
    assert len(moved) == 2
    assert {one.replica for one in answers} == {1}
    for one in answers:
        pause = max(b - a for a, b in zip(one.times, one.times[1:], strict=False))
        assert len(one.times) == 200
        assert (pause > 0.3) == (one in moved), "what the client has is computed again first"
    assert cluster.losses.moved == 2
    assert 0 < cluster.losses.repeated_tokens < 400
    assert [replica.life for replica in cluster.replicas] == [1, 0]
    assert not cluster.replicas[0].kv.pools[0].index


@pytest.mark.parametrize(("between", "restart"), [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_times_that_are_none(between: float, restart: float) -> None:
    with pytest.raises(OptionError, match="above 0") as caught:
        Failures(between, restart)
    assert caught.value.param in ("failures", "restart")


@pytest.mark.slow
def test_command() -> None:
    flags = ["llama-3.1-8b", "--replicas", "4", "--requests", "40", "--output", "64"]
    dying = ["--failures", "400ms", "--restart", "0.3"]
    done = CliRunner().invoke(command, [*flags, *dying, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["simulation"]["failures"]
    assert told["deaths"] > 0
    assert 0 < told["down_share"] < 1
    assert "went on elsewhere" in CliRunner().invoke(command, [*flags, *dying]).output
    assert "went on elsewhere" not in CliRunner().invoke(command, flags).output


def arrivals(
    *sent: tuple[float, int, int, float], lost: tuple[float, int] | None = None
) -> list[float | None]:
    """When each of (time, source, target, bytes) came whole, at 100 bytes/s and 1 s of latency."""
    clock, heap = Clock(), list[tuple[float, int, Callable[[], None]]]()
    found: list[float | None] = [None] * len(sent)

    def at(time: float, action: Callable[[], None]) -> None:
        heapq.heappush(heap, (time, next(order), action))

    order = iter(range(10_000))
    ports = Ports(100.0, 1.0, clock, at)
    for number, (time, source, target, size) in enumerate(sent):

        def arrive(whole: bool, number: int = number) -> None:
            found[number] = clock.now if whole else None

        one = Transfer(source, target, size, arrive)
        at(time, lambda one=one: ports.send(one))  # type: ignore[misc]
    if lost is not None:
        at(lost[0], lambda: ports.drop(lost[1]))
    while heap:
        clock.now, _, action = heapq.heappop(heap)
        action()
    return found


def test_transfers_share_a_port() -> None:
    """By hand: the first has 50 of 100 bytes left when the second comes; both at half the speed
    until it ends at 1.5, and the second, half done, has the port alone again."""
    assert arrivals((0.0, 0, 2, 100.0)) == pytest.approx([2.0])
    assert arrivals((0.0, 0, 2, 100.0), (0.5, 0, 3, 100.0)) == pytest.approx([2.5, 3.0])
    assert arrivals((0.0, 0, 2, 100.0), (0.0, 1, 2, 100.0)) == pytest.approx([3.0, 3.0]), "in"
    assert arrivals((0.0, 0, 2, 100.0), (0.0, 1, 3, 100.0)) == pytest.approx([2.0, 2.0])
    three = arrivals((0.0, 0, 2, 50.0), (0.0, 0, 3, 100.0), (0.0, 1, 3, 25.0))
    # Half the speed for all; the third ends at 0.5, the first at 1.0, the second is half done then.
    assert three == pytest.approx([2.0, 2.5, 1.5])
    half_way = arrivals((0.0, 0, 2, 100.0), (0.0, 0, 3, 100.0), lost=(1.0, 3))
    assert half_way == [pytest.approx(2.5), None]


def test_prompts_share_their_way_to_the_decode_pool() -> None:
    """One replica prefills both. The second leaves while the first is on its way: for both it takes
    twice what one takes, but for the time that the first had the port alone."""
    slow = replace(SPEC, hardware=replace(DEVICES["H200"], link_bandwidth=1e9))
    requests = [(0.0, SimRequest(str(n), [9 + n] * 1000, 2)) for n in range(2)]

    def times(count: int) -> list[list[float]]:
        return [one.times for one in Cluster(slow, 3, prefill=1).run(requests[:count])]

    one_way = 1000 * kv_bytes_of_all(CASE.arch, CASE.kv_dtype) / 1e9
    one_way /= slow.hardware.efficiency.network
    ((begin, end),), (first, second) = times(1), times(2)
    apart = second[0] - first[0]
    assert apart < 0.2 * one_way
    expected = end - begin + one_way - apart
    assert [b - a for a, b in (first, second)] == pytest.approx([expected] * 2, abs=0.002)
