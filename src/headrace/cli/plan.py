"""`headrace plan`: the cheapest layout that keeps an SLO, checked by the simulator."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..base.errors import HeadraceError, InvalidRequest
from ..bench.material import Material
from ..bench.metrics import Run, request_values
from ..bench.options import RunOptions
from ..bench.record import RequestRecord
from ..bench.run import make_sessions
from ..bench.virtual import Simulation
from ..bench.workload import shareable_tokens
from ..engine.described import describe_model
from ..engine.draft_law import MEASURED, DraftLaw, draft_law
from ..engine.sim import Cluster
from ..engine.sim_replica import ReplicaSpec
from ..roofline.hardware import DEVICES, find_hardware
from ..roofline.machine import calibration_path
from ..roofline.planner import (
    FORMATS,
    MAX_DEVICES,
    Candidate,
    Found,
    Pool,
    Rejected,
    formats_of,
    frontier,
    search,
)
from ..roofline.prices import read_prices
from ..roofline.steady import Demand, Goal
from .plan_tiers import print_tiers

TRIES = 6
"""Candidates that are simulated before giving up."""
STAYS, MAX_REQUESTS = 4, 20_000
"""Simulated time in mean request durations, and the request limit."""
GROWTH = 4
"""Number of times that a candidate which misses gets 15 % more replicas."""
MAX_SIMULATED = 8
"""Most engines of a simulation; larger layouts are checked by a part with its share of the load."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A candidate after the simulation, with its final replicas, and the p99 in seconds."""

    candidate: Candidate
    ttft: float
    tpot: float
    itl: float
    kept: bool


def plan(
    model: Annotated[str, typer.Argument(help="Model, or the name of a known architecture.")],
    rate: Annotated[
        float | None, typer.Option(help="Requests a second; none: 10, or the trace's own.")
    ] = None,
    input: Annotated[int, typer.Option(min=1, help="Prompt tokens, mean.")] = 1024,
    output: Annotated[int, typer.Option(min=1, help="Output tokens, mean.")] = 256,
    shared: Annotated[int, typer.Option(min=0, help="Prompt tokens from the prefix cache.")] = 0,
    trace: Annotated[
        str | None,
        typer.Option(help="FORMAT:FILE: lengths, sharing and rate of recorded requests instead."),
    ] = None,
    ttft: Annotated[float, typer.Option(help="Limit of the p99 TTFT in ms.")] = 1000.0,
    tpot: Annotated[float, typer.Option(help="Limit of the p99 TPOT in ms.")] = 50.0,
    itl: Annotated[float | None, typer.Option(help="Limit of the p99 ITL in ms.")] = None,
    hardware: Annotated[str, typer.Option(help="Devices to choose from, by commas.")] = "all",
    formats: Annotated[
        str | None,
        typer.Option(
            help="Weight formats to choose from; none: as published, of wide ones "
            + " and ".join(FORMATS)
            + " (int4 and nvfp4 can cost quality: name them)."
        ),
    ] = None,
    kv_dtype: Annotated[
        str, typer.Option(help="auto: fp8 beside fp8 and nvfp4 weights where the device has it.")
    ] = "auto",
    pools: Annotated[bool, typer.Option(help="Also try prefill and decode pools.")] = True,
    max_devices: Annotated[int, typer.Option(min=1, help="Of one replica.")] = MAX_DEVICES,
    prices: Annotated[Path | None, typer.Option(help='JSON as in {"H200": 3.8}.')] = None,
    requests: Annotated[
        int, typer.Option(min=50, help="Requests of a simulation at least; as many as are steady.")
    ] = 400,
    speculate: Annotated[
        str,
        typer.Option(
            help=f"Drafts: off, as measured of {', '.join(MEASURED)}, or a chance from 0 to 1; on "
            "CPUs, which verify them."
        ),
    ] = "off",
    tiers: Annotated[
        Path | None,
        typer.Option(
            help="Instead: what each size of RAM and disk for KV would have saved of this trace, "
            "which an engine with --context-cache-trace wrote."
        ),
    ] = None,
    tiers_pool: Annotated[str, typer.Option(help="RAM of the pool above the disk.")] = "1GiB",
    tiers_price: Annotated[
        float | None, typer.Option(help="Of an hour of the machine: savings as money.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Find the cheapest hardware and layout for a load and an SLO; the simulator has the last
    word."""
    if tiers is not None:
        print_tiers(tiers, tiers_pool, tiers_price, as_json=as_json)
        return
    described = describe_model(model)
    arch = described.arch
    devices = (
        list(DEVICES.values())
        if hardware == "all"
        else [find_hardware(name, calibration_path()) for name in hardware.split(",")]
    )
    law = None if speculate == "off" else draft_law(speculate)
    if law is not None and (others := [one.name for one in devices if one.kind != "cpu"]):
        raise InvalidRequest(
            f"drafts are not verified on {others[0]} yet: plan with --hardware this or a CPU's "
            "file, or without --speculate",
            param="speculate",
        )
    if trace is not None:
        demand = demand_of(trace, rate)
    elif shared >= input:
        raise InvalidRequest("shared must be less than input", param="shared")
    else:
        demand = Demand(10.0 if rate is None else rate, input, output, shared)
    if law is not None:
        demand = replace(demand, accepted=law.accepted)
    goal = Goal(ttft / 1e3, tpot / 1e3, None if itl is None else itl / 1e3)
    found = search(
        arch,
        demand,
        goal,
        read_prices(prices, devices),
        devices=devices,
        formats=re.split(",(?![a-z_]+=)", formats) if formats else formats_of(described.weights),
        kv_dtype=kv_dtype,
        pools=pools,
        max_devices=max_devices,
    )
    console = Console(highlight=False)
    checked: list[Checked] = []
    for candidate in found.candidates[:TRIES]:
        checked.append(verify(candidate, demand, goal, requests, trace, law))
        if checked[-1].kept:
            break
    if as_json:
        print(json.dumps(document(demand, found, checked)))
    else:
        _show(console, demand, found, checked)
        _show_rejected(console, found)
    best = checked[-1] if checked and checked[-1].kept else None
    if best is None:
        raise HeadraceError(impossible(found, checked, demand), param="ttft")
    if not as_json:
        _show_best(console, best, demand)


def impossible(found: Found, checked: list[Checked], demand: Demand) -> str:
    """Explain why nothing keeps the limits, and name the nearest candidate."""
    if checked:
        near = min(checked, key=lambda one: one.ttft + one.tpot)
        return (
            f"the {len(checked)} cheapest layouts missed the limits in the simulator; the nearest "
            f"was {near.candidate}: p99 TTFT {near.ttft * 1e3:.0f} ms, TPOT {near.tpot * 1e3:.1f} "
            f"ms, ITL {near.itl * 1e3:.1f} ms"
        )
    if found.nearest is None:
        reasons = Counter(one.reason for one in found.rejected)
        return "no layout can hold the model: " + reasons.most_common(1)[0][0]
    near_ = found.nearest
    return (
        f"no layout keeps these limits for {demand.input_tokens:,} + {demand.output_tokens:,} "
        f"tokens; the nearest is {near_} in {near_.case.weights.name}: TTFT "
        f"{near_.ttft * 1e3:.0f} ms, TPOT {near_.tpot * 1e3:.1f} ms, ITL {near_.itl * 1e3:.1f} ms, "
        f"{near_.price_per_hour:.2f} per hour"
    )


def demand_of(trace: str, rate: float | None) -> Demand:
    """Compute the means of a trace's requests, with its own rate unless one is given."""
    options = RunOptions(url="simulated", trace=trace)
    options.verify()
    sessions, _ = make_sessions(options, Material())
    turns = [turn for session in sessions for turn in session.turns]
    times = [session.at for session in sessions if session.at is not None]
    if rate is None:
        if len(times) < 2 or max(times) == min(times):
            raise InvalidRequest(f"{trace} has no times: say --rate", param="rate")
        rate = len(turns) / (max(times) - min(times))
    given = round(sum(turn.prompt_tokens for turn in turns) / len(turns))
    wanted = round(sum(turn.output_tokens for turn in turns) / len(turns))
    shared = round(shareable_tokens(sessions) / len(turns))
    return Demand(rate, max(1, given), max(1, wanted), min(shared, max(0, given - 1)))


def verify(
    candidate: Candidate,
    demand: Demand,
    goal: Goal,
    requests: int,
    trace: str | None = None,
    law: DraftLaw | None = None,
) -> Checked:
    """Simulate; add replicas while it misses."""
    for attempt in range(GROWTH + 1):
        run = simulate(candidate, demand, goal, requests, trace, law)
        slo = run.slo
        assert slo is not None
        steady = steady_part(run.records)
        ttft, tpot, itl = (percentile(name, steady) for name in ("ttft", "tpot", "itl"))
        met = slo.met(steady)
        if met or attempt == GROWTH:
            break
        candidate = grown(candidate)
    return Checked(candidate, ttft, tpot, itl, met)


def grown(candidate: Candidate) -> Candidate:
    """Add 15 % more replicas in each pool, and their price."""
    pools = tuple(
        replace(pool, replicas=max(pool.replicas + 1, round(pool.replicas * 1.15)))
        for pool in candidate.pools
    )
    devices = sum(pool.devices for pool in pools)
    return replace(
        candidate,
        pools=pools,
        price_per_hour=candidate.price_per_hour * devices / candidate.devices,
    )


def steady_part(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the requests of a steady batch.

    The first ones met no full batch. The last ones, after which no others came, ran in a shrinking
    batch.
    """
    residence = statistics.median(record.end_ns - record.planned_ns for record in records)
    first, last = records[0].planned_ns, records[-1].planned_ns
    kept = [r for r in records if first + residence <= r.planned_ns <= last - residence]
    return kept or list(records)


def percentile(metric: str, records: Sequence[RequestRecord]) -> float:
    values = [value for record in records for value in request_values(metric, record)]
    return float(np.percentile(values, 99)) if values else 0.0


def simulate(
    candidate: Candidate,
    demand: Demand,
    goal: Goal,
    requests: int,
    trace: str | None = None,
    law: DraftLaw | None = None,
) -> Run:
    """Simulate a part of the layout with its share of a Poisson load and spread lengths.

    The run lasts four times as long as a request is expected to stay.
    """
    fresh = demand.fresh
    pools = candidate.pools
    engines = sum(pool.replicas * pool.case.layout.engines for pool in pools)
    share = min(1.0, MAX_SIMULATED / engines)
    used = [max(1, round(pool.replicas * share)) for pool in pools]
    carried = min(n / pool.replicas for n, pool in zip(used, pools, strict=True))
    specs = [_spec(candidate, pool, demand, law) for pool in pools]
    cluster = Cluster(
        specs[0],
        sum(used),
        "prefix" if demand.shared_tokens else "least-loaded",
        prefill=used[0] if len(pools) > 1 else 0,
        decode_spec=specs[-1],
    )
    # The log-normal's median for this mean, at sigma 0.4.
    median = {
        name: max(1, round(mean / 1.083))
        for name, mean in (("input", fresh), ("output", demand.output_tokens))
    }
    stay = candidate.ttft + demand.output_tokens * candidate.tpot
    steady = min(MAX_REQUESTS, math.ceil(STAYS * stay * demand.rate * carried))
    limits = [f"ttft:p99<{goal.ttft:.6f}s", f"tpot:p99<{goal.tpot:.6f}s"]
    if goal.itl is not None:
        limits.append(f"itl:p99<{goal.itl:.6f}s")
    options = RunOptions(
        url="simulated",
        workload="shared-prefix" if demand.shared_tokens else "fixed",
        prefix_tokens=max(1, demand.shared_tokens),
        groups=4,
        requests=max(requests, 40 * len(cluster.replicas), steady),
        trace=trace,
        input=f"lognormal:{median['input']}:0.4@1-{2 * demand.input_tokens}",
        output=f"lognormal:{median['output']}:0.4@2-{2 * demand.output_tokens + 2}",
        arrivals=f"poisson:{demand.rate * carried}",
        slo=",".join(limits),
    )
    return Simulation(cluster, options).run()[1]


def _spec(candidate: Candidate, pool: Pool, demand: Demand, law: DraftLaw | None) -> ReplicaSpec:
    longest = 4 * (demand.input_tokens + demand.output_tokens)
    return ReplicaSpec(
        pool.case,
        candidate.hardware,
        rows=max(8, pool.state.batch),
        step_tokens=max(pool.state.step_tokens, pool.state.batch + 16),
        depth=1 if pool.case.layout.pp > 1 else 2,
        max_context=min(pool.case.arch.max_context, longest),
        drafts=law,
    )


def document(demand: Demand, found: Found, checked: list[Checked]) -> dict[str, Any]:
    """Return the whole search, for other programs."""

    def one(candidate: Candidate) -> dict[str, Any]:
        return {
            "device": candidate.hardware.name,
            "pools": [
                {
                    "role": pool.role,
                    "replicas": pool.replicas,
                    "tp": pool.case.layout.tp,
                    "pp": pool.case.layout.pp,
                    "dp": pool.case.layout.dp,
                    "ep": pool.case.layout.ranks if pool.case.layout.ep else 1,
                    "format": pool.case.weights.name,
                    "kv_dtype": pool.case.kv_dtype,
                    "max_sequences": pool.state.batch,
                    "step_tokens": pool.state.step_tokens,
                }
                for pool in candidate.pools
            ],
            "devices": candidate.devices,
            "price_per_hour": candidate.price_per_hour,
            "cost_per_million_output_tokens": candidate.cost_per_million(demand),
            "expected": {"ttft": candidate.ttft, "tpot": candidate.tpot, "itl": candidate.itl},
        }

    return {
        "settings": found.settings,
        "candidates": [one(candidate) for candidate in found.candidates],
        "simulated": [
            {
                **one(c.candidate),
                "p99": {"ttft": c.ttft, "tpot": c.tpot, "itl": c.itl},
                "kept": c.kept,
            }
            for c in checked
        ],
        "nearest": None if found.nearest is None else one(found.nearest),
        "rejected": [
            {"device": r.device, "format": r.format, "layout": str(r.layout), "reason": r.reason}
            for r in found.rejected
        ],
    }


def _show_best(console: Console, best: Checked, demand: Demand) -> None:
    c = best.candidate
    console.print(f"[bold]{c}[/bold] ({c.devices} devices)")
    for pool in c.pools:
        role = "" if pool.role == "all" else f"{pool.role}: "
        console.print(
            f"  {role}weights {pool.case.weights.name}, KV {pool.case.kv_dtype}, max_sequences "
            f"{pool.state.batch}, step_tokens {pool.state.step_tokens} (of each engine)"
        )
    console.print(
        f"  {c.price_per_hour:.2f} per hour, {c.cost_per_million(demand):.3f} per million output "
        f"tokens; simulated p99: TTFT {best.ttft * 1e3:.0f} ms, TPOT {best.tpot * 1e3:.1f} ms, "
        f"ITL {best.itl * 1e3:.1f} ms; efficiencies {c.hardware.efficiency.source}"
    )


def _show(console: Console, demand: Demand, found: Found, checked: list[Checked]) -> None:
    if not found.candidates:
        return
    table = Table(
        title=f"the cheapest of {len(found.candidates)} layouts that should do "
        f"({found.settings:,} settings), and what more money buys",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in (
        "layout",
        "format",
        "batch",
        "step",
        "per hour",
        "per Mtok",
        "p99 TTFT / mean TPOT / p99 ITL",
        "simulated",
    ):
        table.add_column(column, justify="left" if column == "layout" else "right")
    shown = found.candidates[: max(3, len(checked))]
    shown += [c for c in frontier(found.candidates) if all(c is not other for other in shown)]
    for number, c in enumerate(shown[:14]):
        verdict = "–"
        if number < len(checked):
            after = checked[number].candidate
            verdict = "kept" if checked[number].kept else "missed"
            if after.devices != c.devices:
                verdict += f" with {after.devices}"
        state = c.pools[-1].state
        table.add_row(
            str(c),
            c.case.weights.name,
            str(state.batch),
            str(c.pools[0].state.step_tokens),
            f"{c.price_per_hour:.2f}",
            f"{c.cost_per_million(demand):.3f}",
            f"{c.ttft * 1e3:.0f} / {c.tpot * 1e3:.1f} / {c.itl * 1e3:.1f}",
            verdict,
        )
    console.print(table)


def _show_rejected(console: Console, found: Found) -> None:
    """Show per device the reasons why layouts are impossible, or miss the limits."""
    for device in dict.fromkeys(one.device for one in found.rejected):
        mine = [one for one in found.rejected if one.device == device]
        reasons: dict[str, list[Rejected]] = {}
        for one in mine:
            if not one.fits:
                reasons.setdefault(one.reason, []).append(one)
        parts = []
        for reason, those in sorted(reasons.items(), key=lambda item: -len(item[1]))[:3]:
            more = f" and {len(those) - 1} more" if len(those) > 1 else ""
            parts.append(f"{those[0].format} on {those[0].layout}{more}: {reason}")
        left = len(reasons) - 3
        if left > 0:
            parts.append(f"{left} further reasons (--json has all)")
        slow = [one for one in mine if one.fits]
        if slow:
            parts.append(
                f"{len(slow)} miss the limits, {slow[-1].format} on {slow[-1].layout}: "
                f"{slow[-1].reason}"
            )
        console.print(f"[dim]not on {device}: {'; '.join(parts)}[/dim]")


command = typer.Typer(help="The cheapest layout that keeps an SLO.")
command.command()(plan)
