"""The planner: cheapest first, within memory and limits, monotone in what is asked."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from headrace.base.errors import DoesNotFit, InvalidRequest
from headrace.base.layout import Layout
from headrace.cli.plan import demand_of, plan
from headrace.cli.plan_check import Check
from headrace.engine.loop.draft_law import draft_law
from headrace.roofline.counts import device_bytes
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.planner import (
    LOADS,
    Found,
    formats_of,
    frontier,
    layouts,
    make_case,
    search,
    search_each,
)
from headrace.roofline.prices import PRICES, read_prices
from headrace.roofline.steady import Demand, Engine, Goal
from headrace.roofline.weights import WeightBytes, parse_format

LLAMA, LARGE = (known(name)[0] for name in ("llama-3.1-8b", "llama-3.1-70b"))
QWEN_MOE, DEEPSEEK = (known(name)[0] for name in ("qwen3-30b-a3b", "deepseek-v3"))
DEMAND, GOAL = Demand(20.0, 1024, 256), Goal(1.0, 0.05)


@cache
def few(arch: object = LLAMA, demand: Demand = DEMAND, goal: Goal = GOAL, **given: object) -> Found:
    """A search over two devices and formats: quick, and nothing in it depends on how many. What is
    found is read by several tests."""
    chosen = {"devices": ("H100", "L40S"), "formats": ("bfloat16", "fp8"), **given}
    chosen["devices"] = [DEVICES[name] for name in chosen["devices"]]  # type: ignore[attr-defined]
    return search(arch, demand, goal, PRICES, **chosen)  # type: ignore[arg-type]


def test_candidates_keep_the_goal_and_come_by_price() -> None:
    found = few().candidates
    assert found
    prices = [candidate.price_per_hour for candidate in found]
    assert prices == sorted(prices)
    for candidate in found:
        assert GOAL.miss(candidate.ttft, candidate.tpot, candidate.itl) <= 1
        for pool in candidate.pools:
            engines = pool.replicas * pool.case.layout.engines
            assert engines * pool.state.rate >= DEMAND.rate
        assert candidate.price_per_hour == pytest.approx(
            candidate.devices * PRICES[candidate.hardware.name]
        )
    front = frontier(found)
    assert front[0] is found[0]
    tpots = [candidate.tpot for candidate in front]
    assert tpots == sorted(tpots, reverse=True)


def test_every_dimension_is_searched() -> None:
    found = few(QWEN_MOE, goal=Goal(1.0, 0.05, 0.06))
    whole = [one.pools[0] for one in found.candidates if len(one.pools) == 1]
    assert {pool.case.layout.tp for pool in whole} >= {1, 2, 4, 8}
    assert {pool.case.layout.pp for pool in whole} >= {1, 2}
    assert {pool.case.layout.dp for pool in whole} >= {1, 2, 4, 8}
    assert {pool.case.layout.ep for pool in whole} == {False, True}
    assert {pool.case.weights.format for pool in whole} == {"bfloat16", "fp8"}
    assert len({pool.state.batch for pool in whole}) > 1
    roles = [tuple(pool.role for pool in one.pools) for one in found.candidates]
    assert ("prefill", "decode") in roles
    tight = few(goal=Goal(1.0, 0.05, 0.012), formats=("fp8",), devices=("H100",), pools=False)
    budgets = {one.pools[0].state.step_tokens for one in tight.candidates}
    assert 512 in budgets, "a tight ITL needs small chunks"
    assert all(one.itl <= 0.012 for one in tight.candidates)


def test_pools_tell_the_time_of_the_transfer() -> None:
    pooled = [one for one in few().candidates if len(one.pools) == 2]
    assert pooled
    for one in pooled:
        pool = one.pools[0]
        engine = Engine(pool.case, one.hardware, DEMAND)
        alone = min(
            (engine.prefill_only(pool.state.step_tokens, load) for load in LOADS),
            key=lambda state: abs(state.rate - pool.state.rate),
        )
        assert engine.transfer() > 0
        assert one.ttft == pool.state.ttft == pytest.approx(alone.ttft + engine.transfer())


def test_what_does_not_fit_is_named_with_the_reason() -> None:
    found = few(LARGE, pools=False)
    for one in found.candidates:
        assert device_bytes(one.case) < one.hardware.memory
    reasons = {
        (one.device, one.format, str(one.layout)): one.reason
        for one in found.rejected
        if not one.fits
    }
    assert "141 GB of a device's 86 GB" in reasons["H100", "bfloat16", "1"]
    assert "more than a node's 8" in reasons["L40S", "fp8", "TP4·PP4"]
    everything = few(DEEPSEEK, devices=("H100", "THOR"), pools=False).rejected
    assert any("no link" in one.reason for one in everything if one.device == "THOR")
    assert not any("heads cannot" in one.reason for one in everything)
    narrow = few(QWEN_MOE, devices=("H100",), formats=("nvfp4",))
    assert {one.reason for one in narrow.rejected} == {"H100 does not compute in FP4"}


def test_deepseek_needs_many_devices_and_gets_them() -> None:
    found = few(
        DEEPSEEK, replace(DEMAND, rate=50.0), devices=("H200",), formats=("fp8",), pools=False
    )
    assert found.candidates
    for one in found.candidates:
        assert one.case.layout.devices >= 8, "671 GB of fp8 weights need at least five H200"
    assert any(one.case.layout.dp > 1 for one in found.candidates)
    refused = [one.reason for one in found.rejected if one.layout == Layout()]
    assert any("GB of weights" in reason or "weights take" in reason for reason in refused)


def test_memory_of_layouts() -> None:
    """DeepSeek-V3: 671e9 parameters, of which 58 · 256 · 3 · 7168 · 2048 in routed experts."""
    experts = 58 * 256 * 3 * 7168 * 2048
    whole = device_bytes(make_case(DEEPSEEK, "fp8", DEVICES["H200"], Layout()))
    assert whole == pytest.approx(671e9, rel=0.02)
    spread = device_bytes(make_case(DEEPSEEK, "fp8", DEVICES["H200"], Layout(1, 1, True, 32)))
    assert spread == pytest.approx(whole - experts + experts / 32, rel=1e-6)
    sliced = device_bytes(make_case(DEEPSEEK, "fp8", DEVICES["H200"], Layout(8, 2)))
    assert sliced == pytest.approx(whole / 16, rel=1e-6)


@pytest.mark.slow  # Four searches; its parts are in the others.
def test_more_load_costs_more_and_a_tighter_goal_costs_more() -> None:
    def cheapest(demand: Demand, goal: Goal) -> float:
        found = few(demand=demand, goal=goal, formats=("fp8",), pools=False)
        return found.candidates[0].price_per_hour

    base = cheapest(DEMAND, GOAL)
    assert cheapest(replace(DEMAND, rate=200.0), GOAL) > base
    assert cheapest(DEMAND, Goal(1.0, 0.006)) > base
    assert cheapest(replace(DEMAND, shared_tokens=900), GOAL) <= base


def test_an_impossible_goal_has_a_nearest() -> None:
    found = few(goal=Goal(1e-4, 1e-4))
    assert found.candidates == []
    assert found.nearest is not None
    assert found.nearest.tpot > 1e-4
    slow = [one for one in found.rejected if one.fits]
    assert slow
    assert all(one.reason.startswith("at best TTFT") for one in slow)
    half = few(goal=Goal(found.nearest.ttft * 1.01, found.nearest.tpot * 1.01))
    assert half.candidates, "limits at the nearest's are possible"


def test_batch_room_and_settings() -> None:
    engine = Engine(make_case(LLAMA, "fp8", DEVICES["H200"], Layout()), DEVICES["H200"], DEMAND)
    assert engine.room() > 200
    small, large = engine.together(8, 2048, 0.85), engine.together(128, 2048, 0.85)
    assert small is not None
    assert large is not None
    assert large.rate > small.rate
    assert large.tpot > small.tpot
    assert engine.together(500, 512, 0.85) is None, "no chunk fits beside the batch"
    lazy = engine.together(128, 2048, 0.35)
    assert lazy is not None
    assert lazy.ttft < large.ttft
    chunks = engine.together(128, 512, 0.85)
    assert chunks is not None
    assert chunks.itl < large.itl
    with pytest.raises(DoesNotFit, match="weights"):
        Engine(
            make_case(LARGE, "bfloat16", DEVICES["RTX4090"], Layout()), DEVICES["RTX4090"], DEMAND
        ).room()


def test_layouts_are_those_that_a_model_allows() -> None:
    assert all(not one.ep and one.dp == 1 for one in layouts(LLAMA))
    assert Layout(3).refusal(LLAMA) == "32 heads cannot be shared by 3 ranks"
    assert "dense" in (Layout(2, ep=True).refusal(LLAMA) or "")
    assert "EP" in (Layout(1, dp=2).refusal(QWEN_MOE) or "")
    assert "too narrow" in (Layout(16).refusal(QWEN_MOE) or "")
    assert Layout(2, 1, True, 4).refusal(QWEN_MOE) is None
    assert str(Layout(2, 1, True, 4)) == "TP2·DP4·EP8"
    assert max(one.devices for one in layouts(DEEPSEEK, 16)) == 16


def test_given_devices_do_the_most_that_they_can() -> None:
    """More devices do more, layouts take at most what there is, and pools share it."""
    rates = {}
    for count in (2, 4, 8):
        found = few(LARGE, devices=("H100",), formats=("fp8",), counts=Counts({"H100": count}))
        rates[count] = found.candidates[0].rate
        assert [one.rate for one in found.candidates] == sorted(
            (one.rate for one in found.candidates), reverse=True
        )
        for one in found.candidates:
            assert one.devices <= count
            for pool in one.pools:
                assert (
                    pool.replicas * pool.case.layout.engines * pool.state.rate >= one.rate * 0.999
                )
    assert rates[2] < rates[4] < rates[8]
    whole = few(LARGE, replace(DEMAND, rate=rates[8]), devices=("H100",), formats=("fp8",))
    assert whole.candidates[0].devices == 8, "the other way round: what this rate needs"


class Counts(dict[str, int]):
    """Numbers of devices that a cache can take as an argument."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def test_a_device_of_ones_own_needs_a_price(tmp_path: Path) -> None:
    own, path = replace(DEVICES["H100"], name="mine"), tmp_path / "prices.json"
    with pytest.raises(
        InvalidRequest, match=r"mine has no price .* \{\"mine\": 3\.8\}, with --prices"
    ):
        read_prices(None, [own])
    path.write_text(json.dumps({"mine": 2.0}))
    with pytest.raises(InvalidRequest, match="'mine' must be one of"):
        read_prices(path)
    prices, _ = read_prices(path, [own])
    found = search(LLAMA, DEMAND, GOAL, prices, devices=[own], formats=["fp8"], pools=False)
    assert {one.price_per_hour / one.devices for one in found.candidates} == {2.0}


def test_prices(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"H200": 1.0}))
    table, source = read_prices(path)
    assert (table["H200"], table["H100"]) == (1.0, PRICES["H100"])
    assert (source.currency, source.date) == ("USD", "without a date")
    path.write_text(json.dumps({"H200": 1.0, "currency": "EUR", "date": "2026-11-01"}))
    source = read_prices(path)[1]
    assert (source.currency, source.date, source.source) == ("EUR", "2026-11-01", "prices.json")
    for wrong in ("{half", '{"H900": 1}', '{"H200": 0}', "[1]"):
        path.write_text(wrong)
        with pytest.raises(InvalidRequest) as error:
            read_prices(path)
        assert error.value.param == "prices"
    with pytest.raises(InvalidRequest, match="rate"):
        few(demand=replace(DEMAND, rate=0))
    with pytest.raises(InvalidRequest, match="made for"):
        few(demand=replace(DEMAND, input_tokens=140_000))


def test_formats_are_the_published_ones_or_as_good() -> None:
    assert formats_of(WeightBytes()) == ("bfloat16", "fp8")
    oss, narrow = known("gpt-oss-120b")
    assert formats_of(narrow) == ("bfloat16,experts=mxfp4",)
    assert formats_of(known("deepseek-v3")[1]) == ("fp8",)
    for weights in (narrow, known("deepseek-v3")[1], WeightBytes()):
        assert parse_format(weights.name) == weights
    found = few(oss, formats=formats_of(narrow), devices=("H100",), pools=False)
    assert {one.case.weights.bits("experts") for one in found.candidates} == {4.25}
    narrow = few(kv_dtype="bfloat16", formats=("fp8",), devices=("H100",), pools=False)
    kept = {one.case.kv_dtype for one in narrow.candidates}
    assert kept == {"bfloat16"}


HOST = replace(
    DEVICES["L40S"], name="host", kind="cpu", bandwidth=60e9, memory=64 << 30, link_bandwidth=0.0
)


def test_drafts_that_hold_make_a_token_cheaper() -> None:
    law, arch = draft_law("code-edit"), known("qwen2.5-0.5b")[0]
    demand = Demand(0.2, 512, 128)
    case = make_case(arch, "int8", HOST, Layout())
    plain = Engine(case, HOST, demand)
    drafting = Engine(case, HOST, replace(demand, accepted=law.accepted))
    wrong = Engine(case, HOST, replace(demand, accepted=(0.0,) * 7))
    assert sum(law.accepted) == pytest.approx(2.3, abs=0.01), "3.3 tokens a step, as measured"
    assert drafting.decode(1) < plain.decode(1) / 1.5
    assert wrong.decode(1) == plain.decode(1), "no draft is verified for nothing"
    assert drafting.decode(1) > plain.decode(1) / 3.3


@pytest.mark.slow
def test_a_plan_with_drafts_is_simulated_with_drafts() -> None:
    law, arch = draft_law("code-edit"), known("qwen2.5-0.5b")[0]
    demand = Demand(0.2, 512, 128, accepted=law.accepted)
    goal = Goal(5.0, 0.2)
    search_of = lambda demand: search(  # noqa: E731
        arch, demand, goal, {"host": 1.0}, devices=[HOST], formats=("int8",), pools=False
    ).candidates[0]
    candidate, alone = search_of(demand), search_of(replace(demand, accepted=()))
    assert candidate.cost_per_million(demand) <= alone.cost_per_million(demand)
    with_drafts, without = (
        Check(demand, goal, 50, law=one).at(candidate).tpot for one in (law, None)
    )
    assert with_drafts < without


def test_no_gpu_is_planned_with_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="drafts are not verified on H100 yet"):
        plan("llama-3.1-8b", hardware="H100", speculate="prose")


def test_a_trace_is_a_demand(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": n * 500,
                    "input_length": 1024,
                    "output_length": 100 + n % 2,
                    "hash_ids": [1, 100 + n],
                }
            )
            + "\n"
            for n in range(41)
        )
    )
    found = demand_of(f"mooncake:{path}", None)
    assert found == Demand(pytest.approx(2.05), 1024, 100, round(512 * 40 / 41))
    assert demand_of(f"mooncake:{path}", 7.0).rate == 7.0
    (tmp_path / "p.jsonl").write_text('{"text": "hello there"}\n')
    with pytest.raises(InvalidRequest, match="--rate"):
        demand_of(f"prompts:{tmp_path / 'p.jsonl'}", None)


@pytest.mark.parametrize("counts", [None, {"H100": 4, "L40S": 4, "A100": 1}])
def test_devices_that_are_searched_apart_give_what_one_search_gives(
    counts: dict[str, int] | None,
) -> None:
    """In the same order; two hold no replica within the limits, one of them nearer."""
    arch, demand, goal = known("llama-3.1-70b")[0], Demand(20.0, 500, 100), Goal(0.3, 0.03)
    devices = [DEVICES[name] for name in ("H100", "L40S", "A100")]
    options = {"formats": ["fp8", "bfloat16"], "max_devices": 4, "counts": counts}
    whole = search(arch, demand, goal, PRICES, devices=devices, **options)
    with ThreadPoolExecutor(2) as pool:
        assert search_each(pool, arch, demand, goal, PRICES, devices=devices, **options) == whole
    assert whole.candidates
    assert whole.nearest is not None
