"""The simulator: real scheduler and KV manager, steps timed by the roofline, all deterministic."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import DoesNotFit, HeadraceError, OptionError
from headrace.base.layout import Layout
from headrace.bench.limit import add_limit, limit_of
from headrace.bench.loop import LOADS, NONE, loop_of, seen
from headrace.bench.loop import simulate as run
from headrace.bench.metrics import Run
from headrace.bench.options import RunOptions
from headrace.bench.record import RequestRecord
from headrace.bench.report import html_report, result_charts
from headrace.bench.virtual import Simulation
from headrace.cli.plan import command as plan_command
from headrace.cli.simulate import command
from headrace.engine.loop.draft_law import LENGTHS, MEASURED, draft_law, verifying
from headrace.engine.simulator.routing import LeastLoaded, PrefixAffinity, RoundRobin
from headrace.engine.simulator.sim import Cluster
from headrace.engine.simulator.sim_replica import ReplicaSpec, SimRequest
from headrace.roofline.composition import decode_step, prefill_step
from headrace.roofline.counts import Case
from headrace.roofline.efficiency import CPU_EFFICIENCY
from headrace.roofline.hardware import DEVICES, Hardware, Loop
from headrace.roofline.hardware_files import load_hardware, save_hardware
from headrace.roofline.known import known
from headrace.roofline.step import StepModel
from headrace.roofline.weights import WeightBytes
from headrace.sched.price import least

LLAMA = known("llama-3.1-8b")[0]
CASE = Case(LLAMA, WeightBytes("fp8"))
HOME = Hardware("CPU", {"float32": 1e12, "int8": 8e12}, 4e10, 2**36, kind="cpu")
SPEC = ReplicaSpec(CASE, DEVICES["H200"], rows=64, max_context=8192)


def simulate(cluster: Cluster, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "url": "simulated",
        "requests": 60,
        "input": "512",
        "output": "64",
        "concurrency": 16,
    }
    return Simulation(cluster, RunOptions(**{**values, **changes})).run()[0]


def value(result: dict[str, Any], name: str, percentile: str | None = None) -> float:
    if percentile is None:
        return float(result["figures"][name]["value"])
    return float(result["samples"][name]["percentiles"][percentile])


def test_equals_take_turns() -> None:
    replicas = Cluster(SPEC, 3).replicas
    router, request = LeastLoaded(), SimRequest("a", [5], 1)
    assert [router.choose(request, replicas).number for _ in range(4)] == [1, 2, 0, 1]
    replicas[2].outstanding = 1
    assert [router.choose(request, replicas).number for _ in range(3)] == [0, 1, 0]


def looped(loop: Loop) -> ReplicaSpec:
    return replace(SPEC, hardware=replace(SPEC.hardware, loop=loop))


def test_what_is_around_a_step_is_counted() -> None:
    """Before the engine, between steps, after a step; at depth 2 the loop is hidden."""
    request = SimRequest("a", list(range(2, 702)), 5)
    (bare,) = Cluster(looped(Loop(0.0)), 1).run([(1.0, request)])
    full = looped(Loop(0.1, 0.015, 0.005, 0.003))
    (answer,) = Cluster(full, 1).run([(1.0, request)])
    assert answer.times[0] == pytest.approx(bare.times[0] + 0.1 + 0.02 + 0.003)
    assert answer.times[-1] == pytest.approx(bare.times[-1] + 0.1 + 5 * 0.02 + 0.003)
    (hidden,) = Cluster(replace(full, depth=2), 1).run([(1.0, request)])
    assert hidden.times[-1] == pytest.approx(bare.times[-1] + 0.1 + 0.003)


def found_loop(real: ReplicaSpec, told: ReplicaSpec, loop: Loop) -> Loop:
    """Measure a server with the steps `real` and overhead `loop` against the spec `told`."""
    options = {name: RunOptions(seed=5, **load) for name, load in LOADS.items()}
    both = (
        {name: seen(run(spec, one, around)[1]) for name, one in options.items()}
        for spec, around in ((real, loop), (told, NONE))
    )
    return loop_of(*both)


def test_the_loop_is_found_again() -> None:
    """Medians of runs with a known loop give that loop back."""
    true = Loop(0.004, 0.003, 0.0005, 0.004)
    found = found_loop(SPEC, SPEC, true)
    assert found.step_seconds == pytest.approx(true.step_seconds, rel=0.1)
    assert found.row_seconds == pytest.approx(true.row_seconds, rel=0.1)
    assert found.gateway_seconds + found.answer_seconds == pytest.approx(0.008, rel=0.1)
    assert found.hitch_seconds == 0


def test_a_step_that_is_told_wrong_is_no_gateway() -> None:
    """Prompts that compute a quarter slower than told do not become time at the gateway."""
    cpu = replace(SPEC, case=Case(LLAMA, WeightBytes("int8"), "float32"), hardware=HOME)
    slow = replace(HOME, rates={name: rate / 1.25 for name, rate in HOME.rates.items()})
    found = found_loop(replace(cpu, hardware=slow), cpu, Loop(0.004, 0.003, 0.0005, 0.004))
    (long,) = Cluster(replace(cpu, hardware=replace(HOME, loop=NONE)), 1).run(
        [(0.0, SimRequest("a", list(range(2, 130)), 1))]
    )
    assert long.end / 4 > 0.05, "what a mean prompt takes longer"
    assert found.gateway_seconds + found.answer_seconds < 0.25 * long.end / 4


def paused(rate: float, length: float, extra: list[float]) -> Loop:
    """The loop of 430 steps of 13 ms with such interruptions."""
    share, shares = rate * 0.013, [(number + 0.5) / 430 for number in range(430)]
    pauses = [0.013 + length * math.log(max(1, share / one)) for one in shares]
    real, bare = seen(run_of(pauses + extra)), seen(run_of([0.013] * 430))
    return loop_of(*(dict.fromkeys(LOADS, one) for one in (real, bare)))


def run_of(pauses: list[float]) -> Run:
    """A run of one request with such pauses after its first token."""
    times = [round(1e9 * time) for time in itertools.accumulate(pauses, initial=0.1)]
    record = RequestRecord(0, 0, 0, 0, 0, chunk_ns=times, end_ns=times[-1], status=200)
    return Run([record], 0, times[-1])


def test_interruptions_are_found_again() -> None:
    found = paused(13.0, 0.007, [])
    assert found.hitch_seconds == pytest.approx(0.007, rel=0.2)
    assert found.hitch_rate == pytest.approx(13.0, rel=0.2)
    assert found.step_seconds == pytest.approx(0, abs=1e-4), "the median has none"


def test_one_stall_is_no_interruption() -> None:
    """A machine that stood still once while the loop was measured does not so in every run."""
    without, stalled = paused(13.0, 0.007, []), paused(13.0, 0.007, [2.0])
    assert stalled.hitch_seconds == pytest.approx(without.hitch_seconds, rel=0.25)
    lost = [one.hitch_rate * one.hitch_seconds for one in (without, stalled)]
    assert lost[1] == pytest.approx(lost[0], rel=0.1)
    assert paused(0.0, 0.007, [2.0]).hitch_rate == 0


def test_a_gateway_does_one_request_after_another() -> None:
    requests = [(1.0, SimRequest(str(n), list(range(2, 34)), 1)) for n in range(4)]
    for replicas, last in ((1, 1.4), (2, 1.2)):
        cluster = Cluster(looped(Loop(0.1)), replicas)
        answers = cluster.run(requests)
        assert max(answer.end for answer in answers) == pytest.approx(last, abs=0.02)


def test_the_loop_can_be_stated_and_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    kept = replace(DEVICES["H200"], loop=Loop(0.004, 0.003, 0.0005, 0.004))
    save_hardware(kept, file)
    assert load_hardware(file) == kept
    common = ["llama-3.1-8b", "--requests", "2", "-c", "1", "--depth", "1", "--json"]

    def itl(*flags: str) -> float:
        done = CliRunner().invoke(command, [*common, *flags])
        assert done.exit_code == 0, done.output
        return value(json.loads(done.stdout), "itl", "p50")

    bare = itl("--hardware", "H200")
    assert itl("--hardware", str(file)) == pytest.approx(bare + 0.0035, rel=1e-6)
    stated = itl("--hardware", str(file), "--loop", "10ms", "--row", "0")
    assert stated == pytest.approx(bare + 0.01, rel=1e-6)
    file.write_text(file.read_text().replace("0.003", "-1"))
    with pytest.raises(OptionError, match="loop"):
        load_hardware(file)


def test_stages_work_on_several_batches() -> None:
    """Two stages: a request alone takes the whole pipeline's time, two at once hardly more."""
    case = replace(CASE, layout=Layout(1, 2))
    spec = replace(SPEC, case=case, prefix_cache=False)
    one = SimRequest("a", list(range(2, 4002)), 20)
    two = SimRequest("b", list(range(9002, 13_002)), 20)
    (alone,) = Cluster(spec, 1).run([(0.0, one)])
    model = StepModel(case, DEVICES["H200"])
    first = spec.hardware.loop.gateway_seconds + model.seconds(prefill_step(LLAMA, [4000]))
    assert alone.times[0] == pytest.approx(first)
    cluster = Cluster(spec, 1)
    assert (len(cluster.replicas), cluster.devices) == (2, 2)
    both = cluster.run([(0.0, one), (0.0, two)])
    ends = {answer.request.id: answer.end for answer in both}
    assert ends["a"] <= alone.end * 1.05
    single = Cluster(replace(SPEC, prefix_cache=False), 1).run([(0.0, one), (0.0, two)])
    assert max(ends.values()) < max(answer.end for answer in single)


def test_data_parallel_groups_are_engines_of_one_replica() -> None:
    moe = known("qwen3-30b-a3b")[0]
    case = Case(moe, WeightBytes("fp8"), layout=Layout(2, 1, True, 4))
    cluster = Cluster(ReplicaSpec(case, DEVICES["H200"], rows=32, max_context=4096), 2)
    assert (len(cluster.replicas), cluster.devices) == (8, 16)
    result = simulate(cluster, concurrency=16)
    assert result["simulation"]["devices"] == 16
    assert result["succeeded"] == 60
    with pytest.raises(HeadraceError, match="dense"):
        Cluster(replace(SPEC, case=replace(CASE, layout=Layout(2, ep=True))), 1)


def test_one_request_takes_what_the_roofline_says() -> None:
    request = SimRequest("a", list(range(2, 702)), 5)
    (answer,) = Cluster(SPEC, 1).run([(1.0, request)])
    model = StepModel(CASE, DEVICES["H200"])
    first = 1.0 + SPEC.hardware.loop.gateway_seconds + model.seconds(prefill_step(LLAMA, [700]))
    assert answer.times[0] == pytest.approx(first)
    expected = [model.seconds(decode_step(LLAMA, 1, 700 + n)) for n in range(4)]
    gaps = [b - a for a, b in zip(answer.times, answer.times[1:], strict=False)]
    assert gaps == pytest.approx(expected)
    assert answer.end == answer.times[-1]


def test_prices_of_drafts_are_the_fits_where_steps_were_fitted() -> None:
    """If only ceilings are known, a row costs a fifth of a step, as cheap as it may look."""
    rates = {"float32": 1e14, "int8": 1e14}
    cpu = Hardware("C", rates, 2e10, 2**36, kind="cpu", efficiency=CPU_EFFICIENCY)
    fitted = cpu.fitted(replace(CPU_EFFICIENCY, overlap=0.9, source="fitted"))
    one, eight = (verifying(StepModel(CASE, cpu), rows) for rows in (1, 8))
    assert eight == pytest.approx(one * least(8))
    assert verifying(StepModel(CASE, fitted), 8) < 1.1 * one


def test_the_same_input_gives_the_same_output() -> None:
    results = [
        simulate(Cluster(SPEC, 4, "prefix"), workload="shared-prefix", arrivals="poisson:40")
        for _ in range(2)
    ]
    for result in results:
        result.pop("created")
    assert results[0] == results[1]


def test_a_closed_loop_keeps_its_users_busy() -> None:
    result = simulate(Cluster(SPEC, 1))
    assert result["succeeded"] == 60
    assert value(result, "concurrency") <= 16
    assert value(result, "concurrency") > 12
    assert result["simulation"]["busy"][0] > 0.95
    assert value(result, "output_throughput") == pytest.approx(60 * 64 / result["seconds"])


def test_more_engines_do_more() -> None:
    rates = [
        value(simulate(Cluster(SPEC, count), requests=200, concurrency=64), "output_throughput")
        for count in (1, 2, 4)
    ]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] < 4 * rates[0], "small batches are less efficient"


def test_two_steps_in_flight_hide_nothing_but_also_lose_nothing() -> None:
    one = simulate(Cluster(SPEC, 1))
    two = simulate(Cluster(ReplicaSpec(CASE, DEVICES["H200"], 64, max_context=8192, depth=2), 1))
    assert two["succeeded"] == one["succeeded"] == 60
    assert value(two, "output_throughput") == pytest.approx(
        value(one, "output_throughput"), rel=0.1
    )


@pytest.mark.slow
def test_prefix_routing_hits_where_round_robin_misses() -> None:
    wish = {
        "workload": "shared-prefix",
        "requests": 300,
        "groups": 40,
        "prefix_tokens": 1024,
        "input": "64",
        "output": "16",
        "arrivals": "poisson:100",
        "zipf": 0.2,
    }
    found = {name: simulate(Cluster(SPEC, 8, name), **wish) for name in ("round-robin", "prefix")}
    hits = {name: value(result, "prefix_hit_rate") for name, result in found.items()}
    assert hits["prefix"] > hits["round-robin"] + 0.2
    assert hits["prefix"] == pytest.approx(value(found["prefix"], "possible_hit_rate"), abs=0.12)
    assert value(found["prefix"], "ttft", "p90") < value(found["round-robin"], "ttft", "p90")


def test_routers_choose() -> None:
    cluster = Cluster(SPEC, 3)
    for replica, outstanding in zip(cluster.replicas, (4, 1, 9), strict=True):
        replica.outstanding = outstanding
    request = SimRequest("a", list(range(512)), 1)
    turns = RoundRobin()
    chosen = [turns.choose(request, cluster.replicas).number for _ in range(4)]
    assert chosen == [0, 1, 2, 0]
    assert LeastLoaded().choose(request, cluster.replicas).number == 1
    prefix = PrefixAffinity()
    assert prefix.choose(request, cluster.replicas).number == 1
    cluster.replicas[0].outstanding = 0
    longer = SimRequest("b", [*range(512), 7, 7], 1)
    assert prefix.choose(longer, cluster.replicas).number == 1, "where its prefix is"
    cluster.replicas[1].outstanding = 90
    assert prefix.choose(longer, cluster.replicas).number == 0, "but not at any price"
    other = SimRequest("c", list(range(1000, 1512)), 1)
    assert prefix.choose(other, cluster.replicas).number == 0


@pytest.mark.slow
def test_a_prefill_pool_takes_prompts_out_of_the_way() -> None:
    wish = {"arrivals": "poisson:12", "requests": 150, "input": "6000", "output": "200"}
    together = simulate(Cluster(SPEC, 4), **wish)
    apart = simulate(Cluster(SPEC, 4, prefill=2), **wish)
    assert apart["succeeded"] == 150
    assert value(apart, "itl", "p99") < value(together, "itl", "p99") / 2
    tokens = [r["samples"]["output_tokens"]["mean"] for r in (together, apart)]
    assert tokens == [200, 200]


@pytest.mark.slow
def test_prompts_go_to_the_prefill_pool_where_the_live_rule_says_so() -> None:
    """None while nobody decodes beside them; under load as if all had to, with what is gained."""
    idle = Cluster(SPEC, 2, prefill=1, handover="pays")
    alone = simulate(idle, requests=20, concurrency=1, input="6000", output="20")
    assert alone["succeeded"] == 20
    assert idle.replicas[0].steps == 0
    wish = {"arrivals": "poisson:12", "requests": 150, "input": "6000", "output": "200"}
    busy = Cluster(SPEC, 4, prefill=2, handover="pays")
    chosen, together = simulate(busy, **wish), simulate(Cluster(SPEC, 4), **wish)
    assert chosen["succeeded"] == 150
    assert min(one.steps for one in busy.replicas) > 0
    assert value(chosen, "itl", "p99") < value(together, "itl", "p99")
    with pytest.raises(OptionError, match="always, pays"):
        Cluster(SPEC, 2, prefill=1, handover="now and then")


def test_multi_turn_finds_its_own_history() -> None:
    result = simulate(
        Cluster(SPEC, 1),
        workload="chat",
        turns=4,
        think_seconds=0.1,
        requests=20,
        input="50",
        prefix_tokens=512,
        groups=4,
    )
    assert result["succeeded"] == 80
    assert value(result, "prefix_hit_rate") > 0.7


def test_cancelled_requests_give_their_place_back() -> None:
    cluster = Cluster(SPEC, 1)
    result = simulate(cluster, workload="agentic", turns=3, requests=30, prefix_tokens=128)
    assert value(result, "cancelled") > 0
    assert not cluster.replicas[0].scheduler.has_work
    cluster.replicas[0].scheduler.check_integrity()


def test_memory_is_planned_as_the_engine_would() -> None:
    with pytest.raises(DoesNotFit):
        Cluster(
            ReplicaSpec(Case(known("llama-3.1-70b")[0]), DEVICES["H100"], 64, max_context=8192), 1
        )
    spread = Case(known("llama-3.1-70b")[0], layout=Layout(tp=4))
    plan = ReplicaSpec(spread, DEVICES["H100"], rows=64, max_context=8192).memory()
    assert plan.kv_bytes_per_token == 80 * 4096 // 4
    with pytest.raises(HeadraceError, match="prefix"):
        Cluster(SPEC, 2, "random")
    with pytest.raises(HeadraceError):
        Cluster(SPEC, 2, prefill=2)


RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "speculation_accept.json"


def test_the_laws_of_drafts_are_those_that_were_measured() -> None:
    told = {
        (one["class"], one["length"]): (one["tokens_per_step"], one["accepted_share"])
        for one in json.loads(RECORDED.read_text())
        if one["drafters"] == "suffix, past answers too"
    }
    for name, columns in MEASURED.items():
        assert list(zip(*columns, strict=True)) == [told[name, length] for length in LENGTHS]


@pytest.mark.parametrize("name", MEASURED)
def test_a_law_gives_back_what_it_was_made_from(name: str) -> None:
    """Expected numbers of its chances, exactly, and of draws."""
    law, chance = draft_law(name), random.Random(1)
    drawn = [law.draw(chance) for _ in range(4000)]
    for length, tokens, share in zip(LENGTHS, *MEASURED[name], strict=True):
        alive = law.survival(length)
        found = list(zip(law.proposed[:length], alive, strict=True))
        right = sum(one * all for one, all in found)
        assert right == pytest.approx(tokens - 1, rel=0.05)
        assert right / sum(law.proposed[:length]) == pytest.approx(share, rel=0.05)
        mean = sum(min(right, length) for _, right in drawn) / len(drawn)
        assert mean == pytest.approx(tokens - 1, rel=0.15, abs=0.02)


def test_drafts_take_steps_away_where_rows_are_cheap() -> None:
    """A chance of one: each decode gets eight tokens a step. Of nought: as without, once it is
    known, and nobody's tokens are lost or come twice."""
    spec = replace(SPEC, hardware=HOME, rows=4)
    load = {"requests": 8, "concurrency": 1, "input": "64", "output": "64"}
    plain = simulate(Cluster(spec, 1), **load)
    found = {
        wish: simulate(Cluster(replace(spec, drafts=draft_law(wish)), 1), **load)
        for wish in ("1", "0", "code-edit")
    }
    for one in found.values():
        assert one["succeeded"] == 8
        assert one["samples"]["output_tokens"] == plain["samples"]["output_tokens"]
    steps = {wish: one["simulation"]["steps"] for wish, one in found.items()}
    assert steps["1"] == 8 * (1 + math.ceil(63 / 8))
    assert steps["0"] == plain["simulation"]["steps"]
    assert steps["1"] < steps["code-edit"] < steps["0"]
    told = {wish: one["simulation"]["speculation"] for wish, one in found.items()}
    assert (told["1"]["synthetic"], told["code-edit"]["synthetic"]) == (True, False)
    assert told["1"]["accepted_tokens"] == told["1"]["draft_tokens"] > told["0"]["draft_tokens"]
    assert "speculation" not in plain["simulation"]


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_go_with_pools_that_are_short_and_two_steps_in_flight(depth: int) -> None:
    spec = replace(SPEC, depth=depth, drafts=draft_law("0.7"), kv_tokens=2048, max_context=1024)
    result = simulate(Cluster(spec, 2, prefill=1), requests=40)
    assert result["samples"]["output_tokens"]["percentiles"]["p50"] == 64
    assert result["succeeded"] == 40
    assert result["simulation"]["speculation"]["accepted_tokens"] > 0
    again = simulate(Cluster(spec, 2, prefill=1), requests=40)
    assert result["samples"] == again["samples"]


@pytest.mark.parametrize("wish", ["poems", "1.5", "nan", ""])
def test_a_law_that_is_none(wish: str) -> None:
    with pytest.raises(OptionError, match="a chance from 0 to 1") as caught:
        draft_law(wish)
    assert caught.value.param == "speculate"


def test_too_long_prompts_are_refused_not_lost() -> None:
    result = simulate(Cluster(SPEC, 1), input="8190", output="64", requests=3)
    assert result["succeeded"] == 0
    assert value(result, "failure_rate") == 1


def test_command() -> None:
    done = CliRunner().invoke(
        command,
        [
            "llama-3.1-8b",
            "--format",
            "fp8",
            "--requests",
            "20",
            "--output",
            "16",
            "--replicas",
            "2",
            "--slo",
            "ttft:p99<5s",
            "--price",
            "3",
        ],
    )
    assert done.exit_code == 0, done.output
    assert "2 × H200" in done.output
    assert "engines at work" in done.output
    assert "ramp and drain" in done.output
    assert "the SLO ttft:p99<5s was met" in done.output


@pytest.mark.slow
def test_plan_command() -> None:
    done = CliRunner().invoke(
        plan_command, ["llama-3.1-8b", "--rate", "20", "--hardware", "H100,L40S"]
    )
    assert done.exit_code == 0, done.output
    assert "per million output tokens" in done.output
    assert "met" in done.output
    refused = CliRunner().invoke(plan_command, ["llama-3.1-8b", "--tpot", "10us"])
    assert refused.exit_code == 3
    assert "no layout" in refused.output
    assert "the nearest is" in refused.output


@pytest.mark.slow
def test_plan_as_json() -> None:
    """A mixture of experts, tight ITL: what was searched, simulated and refused, for programs."""
    done = CliRunner().invoke(
        plan_command,
        ["qwen3-30b-a3b", "--rate", "30", "--hardware", "H100,THOR", "--itl", "40ms", "--json"],
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    kept = found["simulated"][0]
    assert kept["kept"]
    assert kept["p99"]["itl"] <= 0.04
    assert kept["cost_per_million_output_tokens"] > 0
    prices = [one["price_per_hour"] for one in found["candidates"]]
    assert prices == sorted(prices)
    assert any(pool["ep"] > 1 for one in found["candidates"] for pool in one["pools"])
    reasons = {one["reason"] for one in found["rejected"] if one["device"] == "THOR"}
    assert "THOR has no link to others" in reasons


def test_the_share_of_the_roofline() -> None:
    # The simulator takes what the roofline predicts, so the predicted share of a busy engine is
    # near 1, and the limit's share below it.
    options = RunOptions(url="simulated", requests=120, input="256", output="128", concurrency=24)
    result, run = Simulation(Cluster(SPEC, 1), options).run()
    found = limit_of(run, CASE, DEVICES["H200"])
    assert found is not None
    assert found.predicted_share == pytest.approx(1.0, abs=0.15)
    assert 0.3 < found.share < found.predicted_share
    assert found.batch in (23, 24)
    add_limit(result, found, CASE, DEVICES["H200"])
    assert result["figures"]["roofline_share"]["value"] == found.share
    (chart,) = (c for c in result_charts(json.loads(json.dumps(result))) if "Roofline" in c.title)
    measured = {series.name: series for series in chart.series if series.mark == "marked"}
    assert set(measured) == {"decode step, measured", "whole run, measured"}
    ceiling = next(series for series in chart.series if "ceiling" in series.name)
    for series in measured.values():
        assert series.ys[0] < max(ceiling.ys), "nothing is above the roof"
    assert "whole run, measured" in html_report(result)
    assert result["valid"]
    wrong = limit_of(run, CASE, DEVICES["L4"])
    assert wrong is not None
    add_limit(result, wrong, CASE, DEVICES["L4"])
    assert not result["valid"]
    assert result["findings"][0]["code"] == "above_roofline"


def test_a_capped_pool_still_holds_one_sequence() -> None:
    small = ReplicaSpec(CASE, DEVICES["H200"], 64, max_context=8192, kv_tokens=100)
    (group,) = small.memory().pool.groups
    assert group.blocks == 1 + 8192 // 16
    result = simulate(Cluster(small, 1), requests=30, input="3000", output="64")
    assert result["succeeded"] == 30
    assert result["simulation"]["preemptions"] >= 0
