"""`headrace plan`: the cheapest layout that keeps an SLO, checked by the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..base.errors import HeadraceError, InvalidRequest
from ..bench.options import RunOptions
from ..bench.virtual import Simulation
from ..engine.sim import Cluster, ReplicaSpec
from ..loader import open_model
from ..roofline.hardware import DEVICES, find_hardware
from ..roofline.known import KNOWN
from ..roofline.planner import (
    FORMATS,
    Candidate,
    Demand,
    Goal,
    frontier,
    read_prices,
    search,
)

TRIES = 6
"""Candidates that are simulated before giving up."""
GROWTH = 4
"""Times that a candidate which misses gets 15 % more replicas."""
MAX_SIMULATED = 8
"""Replicas of a simulation; larger layouts are checked by a part with its share of the load."""


@dataclass(frozen=True, slots=True)
class Checked:
    candidate: Candidate
    replicas: int
    ttft: float
    tpot: float
    kept: bool


def plan(
    model: Annotated[str, typer.Argument(help="Model, or the name of a known architecture.")],
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 10.0,
    input: Annotated[int, typer.Option(min=1, help="Prompt tokens, mean.")] = 1024,
    output: Annotated[int, typer.Option(min=1, help="Output tokens, mean.")] = 256,
    shared: Annotated[int, typer.Option(min=0, help="Prompt tokens from the prefix cache.")] = 0,
    ttft: Annotated[float, typer.Option(help="Limit of the p99 TTFT in ms.")] = 1000.0,
    tpot: Annotated[float, typer.Option(help="Limit of the p99 TPOT in ms.")] = 50.0,
    hardware: Annotated[str, typer.Option(help="Devices to choose from, by commas.")] = "all",
    formats: Annotated[str, typer.Option(help="Weight formats to choose from.")] = ",".join(
        FORMATS
    ),
    prices: Annotated[Path | None, typer.Option(help='JSON as in {"H200": 3.8}.')] = None,
    requests: Annotated[int, typer.Option(min=50, help="Requests of a simulation.")] = 400,
) -> None:
    """The cheapest hardware and layout for a load and an SLO; the simulator has the last word."""
    known = KNOWN.get(model.lower())
    arch = known if known is not None else open_model(model).arch
    names = list(DEVICES) if hardware == "all" else [
        find_hardware(name).name for name in hardware.split(",")
    ]  # fmt: skip
    if shared >= input:
        raise InvalidRequest("shared must be less than input", param="shared")
    demand, goal = Demand(rate, input, output, shared), Goal(ttft / 1e3, tpot / 1e3)
    found = search(
        arch, demand, goal, read_prices(prices), devices=names, formats=formats.split(",")
    )
    if not found:
        raise HeadraceError(
            f"no layout of {', '.join(names)} keeps TTFT {ttft:g} ms and TPOT {tpot:g} ms for "
            f"{input} + {output} tokens: relax the limits or shorten the prompt",
            param="ttft",
        )
    console = Console()
    checked: list[Checked] = []
    for candidate in found[:TRIES]:
        checked.append(verify(candidate, demand, goal, requests))
        if checked[-1].kept:
            break
    _show(console, demand, found, checked)
    best = checked[-1]
    if not best.kept:
        raise HeadraceError(
            f"the {len(checked)} cheapest layouts missed the limits in the simulator", param="ttft"
        )
    c, devices = best.candidate, best.replicas * best.candidate.case.layout.tp
    hourly = c.price_per_hour / c.replicas * best.replicas
    console.print(
        f"[bold]{best.replicas} replicas of {c.case.layout.tp} × {c.hardware.name}[/bold] "
        f"({devices} devices), weights {c.case.weights.format}, KV {c.case.kv_dtype}, "
        f"max_sequences {c.batch}: {hourly:.2f} per hour, "
        f"{hourly / (rate * output * 3600) * 1e6:.3f} per million output tokens\n"
        f"simulated p99: TTFT {best.ttft * 1e3:.0f} ms, TPOT {best.tpot * 1e3:.1f} ms",
        highlight=False,
    )


def verify(candidate: Candidate, demand: Demand, goal: Goal, requests: int) -> Checked:
    """Simulate; add replicas while it misses."""
    replicas = candidate.replicas
    for _ in range(GROWTH + 1):
        used = min(replicas, MAX_SIMULATED)
        result = simulate(candidate, demand, goal, requests, used, replicas)
        ttft = float(result["samples"]["ttft"]["percentiles"]["p99"])
        tpot = float(result["samples"]["tpot"]["percentiles"]["p99"])
        if result["slo"]["met"]:
            return Checked(candidate, replicas, ttft, tpot, True)
        replicas = max(replicas + 1, round(replicas * 1.15))
    return Checked(candidate, replicas, ttft, tpot, False)


def simulate(
    candidate: Candidate, demand: Demand, goal: Goal, requests: int, used: int, replicas: int
) -> dict[str, Any]:
    """A part of the layout with its share of a Poisson load and spread lengths."""
    fresh = demand.input_tokens - demand.shared_tokens
    spec = ReplicaSpec(
        candidate.case, candidate.hardware, rows=max(8, candidate.batch), depth=2,
        max_context=min(
            candidate.case.arch.max_context, 4 * (demand.input_tokens + demand.output_tokens)
        ),
    )  # fmt: skip
    # The log-normal's median for this mean, at sigma 0.4.
    median = {name: max(1, round(mean / 1.083)) for name, mean in
              (("input", fresh), ("output", demand.output_tokens))}  # fmt: skip
    options = RunOptions(
        url="simulated",
        workload="shared-prefix" if demand.shared_tokens else "fixed",
        prefix_tokens=max(1, demand.shared_tokens), groups=4,
        requests=max(requests, 40 * used),
        input=f"lognormal:{median['input']}:0.4@1-{2 * demand.input_tokens}",
        output=f"lognormal:{median['output']}:0.4@2-{2 * demand.output_tokens + 2}",
        arrivals=f"poisson:{demand.rate * used / replicas}",
        slo=f"ttft:p99<{goal.ttft:.6f}s,tpot:p99<{goal.tpot:.6f}s",
    )  # fmt: skip
    routing = "prefix" if demand.shared_tokens else "least-loaded"
    return Simulation(Cluster(spec, used, routing), options).run()[0]


def _show(console: Console, demand: Demand, found: list[Candidate], checked: list[Checked]) -> None:
    table = Table(
        title="what was searched: the cheapest, and what more money buys", title_justify="left",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for column in ("layout", "format", "batch", "per hour", "per Mtok", "TTFT ms", "TPOT ms",
                   "simulated"):  # fmt: skip
        table.add_column(column, justify="left" if column == "layout" else "right", no_wrap=True)
    simulated = {id(one.candidate): one for one in checked}
    shown = found[: max(3, len(checked))]
    shown += [c for c in frontier(found) if all(c is not other for other in shown)]
    for c in shown[:12]:
        one = simulated.get(id(c))
        verdict = "–" if one is None else f"{'kept' if one.kept else 'missed'} ×{one.replicas}"
        table.add_row(
            f"{c.replicas} × {c.case.layout.tp} {c.hardware.name}", c.case.weights.format,
            str(c.batch), f"{c.price_per_hour:.2f}", f"{c.cost_per_million(demand):.3f}",
            f"{c.ttft * 1e3:.0f}", f"{c.tpot * 1e3:.1f}", verdict,
        )  # fmt: skip
    console.print(table)


command = typer.Typer(help="The cheapest layout that keeps an SLO.")
command.command()(plan)
