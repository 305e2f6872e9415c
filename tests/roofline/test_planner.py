"""The planner: cheapest first, within memory and limits, monotone in what is asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.errors import InvalidRequest
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import KNOWN
from headrace.roofline.planner import (
    PRICES,
    Demand,
    Goal,
    batch_room,
    best_batch,
    frontier,
    make_case,
    read_prices,
    search,
)

LLAMA, LARGE = KNOWN["llama-3.1-8b"], KNOWN["llama-3.1-70b"]
DEMAND, GOAL = Demand(20.0, 1024, 256), Goal(1.0, 0.05)


def test_candidates_keep_the_goal_and_come_by_price() -> None:
    found = search(LLAMA, DEMAND, GOAL, PRICES)
    assert found
    prices = [candidate.price_per_hour for candidate in found]
    assert prices == sorted(prices)
    for candidate in found:
        assert candidate.ttft <= GOAL.ttft
        assert candidate.tpot <= GOAL.tpot
        assert candidate.replicas * candidate.replica_rate >= DEMAND.rate
        assert candidate.price_per_hour == pytest.approx(
            candidate.devices * PRICES[candidate.hardware.name]
        )
        assert candidate.batch <= batch_room(candidate.case, candidate.hardware, DEMAND)
    front = frontier(found)
    assert front[0] is found[0]
    tpots = [candidate.tpot for candidate in front]
    assert tpots == sorted(tpots, reverse=True)


def test_what_does_not_fit_is_not_proposed() -> None:
    for candidate in search(LARGE, DEMAND, GOAL, PRICES):
        assert candidate.hardware.memory * candidate.case.layout.tp > 35e9
    assert batch_room(make_case(LARGE, "bfloat16", DEVICES["RTX4090"], 1), DEVICES["RTX4090"],
                      DEMAND) == 0  # fmt: skip
    long = replace(DEMAND, input_tokens=140_000)
    assert search(LLAMA, long, GOAL, PRICES) == []


def test_more_load_costs_more_and_a_tighter_goal_costs_more() -> None:
    def cheapest(demand: Demand, goal: Goal) -> float:
        return search(LLAMA, demand, goal, PRICES)[0].price_per_hour

    base = cheapest(DEMAND, GOAL)
    assert cheapest(replace(DEMAND, rate=200.0), GOAL) > base
    assert cheapest(DEMAND, Goal(1.0, 0.008)) > base
    assert cheapest(replace(DEMAND, shared_tokens=900), GOAL) <= base
    assert search(LLAMA, DEMAND, Goal(1e-4, 1e-4), PRICES) == []


def test_a_larger_batch_serves_more_until_the_goal_binds() -> None:
    case = make_case(LLAMA, "fp8", DEVICES["H200"], 1)
    loose = best_batch(case, DEVICES["H200"], DEMAND, Goal(5, 0.2), 1.0)
    tight = best_batch(case, DEVICES["H200"], DEMAND, Goal(5, 0.01), 1.0)
    assert loose is not None
    assert tight is not None
    assert loose.batch > tight.batch
    assert loose.replica_rate > tight.replica_rate


def test_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"H200": 1.0}))
    assert read_prices(path)["H200"] == 1.0
    assert read_prices(path)["H100"] == PRICES["H100"]
    for wrong in ("{half", '{"H900": 1}', '{"H200": 0}', "[1]"):
        path.write_text(wrong)
        with pytest.raises(InvalidRequest) as error:
            read_prices(path)
        assert error.value.param == "prices"
    with pytest.raises(InvalidRequest, match="rate"):
        search(LLAMA, replace(DEMAND, rate=0), GOAL, PRICES)
