"""`headrace simulate`: a workload on engines that do not exist yet."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..base.errors import HeadraceError
from ..base.layout import Layout
from ..bench.live import show_result
from ..bench.options import RunOptions
from ..bench.report import html_report
from ..bench.virtual import COURSES, Simulation, bands
from ..engine.described import make_case
from ..engine.draft_law import MEASURED, draft_law
from ..engine.routing import ROUTERS
from ..engine.sim import Cluster, Failures
from ..engine.sim_replica import ReplicaSpec
from ..roofline.hardware import find_hardware
from ..roofline.machine import calibration_path
from .bench_flags import with_run_flags

FEW = 200
"""Number of requests below which the 99th percentiles are those of two or three steps."""


@with_run_flags(
    only="workload trace trace_speed input output requests arrivals concurrency prefix_tokens "
    "groups zipf turns think_seconds seed slo price_per_hour",
    input="1024",
    output="256",
    requests=1000,
    concurrency=64,
    seed=0,
)
def simulate(
    options: RunOptions,
    model: Annotated[str, typer.Argument(help="Model, or the name of a known architecture.")],
    hardware: Annotated[str, typer.Option(help="this, A100, H100, H200, B200 …")] = "H200",
    replicas: Annotated[int, typer.Option(min=1, help="Engines behind the router.")] = 1,
    prefill: Annotated[int, typer.Option(min=0, help="How many of them only prefill.")] = 0,
    handover: Annotated[
        str, typer.Option(help="Prompts that these compute: always all, or pays: by the live rule.")
    ] = "always",
    routing: Annotated[str, typer.Option(help=", ".join(ROUTERS))] = "least-loaded",
    told_after: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds in which `prefix` learns what caches hold; none: it knows what it sent.",
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Ranks, stages, attention groups, spread experts: TP2.PP2, DP8.EP8.")
    ] = "1",
    skew: Annotated[
        float | None,
        typer.Option(min=0, help="How unevenly experts are chosen; 0: evenly; none: as published."),
    ] = None,
    format: Annotated[str | None, typer.Option(help="Weight format.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="Type of the KV cache.")] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="Sequences at a time, per engine.")] = 256,
    step_tokens: Annotated[int, typer.Option(min=16, help="Token budget of a step.")] = 8192,
    max_context: Annotated[int | None, typer.Option(help="Longest sequence.")] = None,
    depth: Annotated[int, typer.Option(min=1, max=2, help="Steps in flight.")] = 2,
    prefix_cache: Annotated[bool, typer.Option(help="Share prefixes.")] = True,
    speculate: Annotated[
        str,
        typer.Option(
            help=f"Drafts: off, as measured of {', '.join(MEASURED)}, or a chance from 0 to 1."
        ),
    ] = "off",
    failures: Annotated[
        float | None,
        typer.Option(help="A replica dies after so many seconds, in the mean; none: never."),
    ] = None,
    restart: Annotated[float, typer.Option(help="Seconds until it is back, its cache empty.")] = 60,
    gateway_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Before the engine; none: as calibrated (--measure-loop), or 1."),
    ] = None,
    loop_ms: Annotated[
        float | None,
        typer.Option(min=0, help="Between steps, hidden at depth 2; none: as calibrated, or 0."),
    ] = None,
    row_ms: Annotated[
        float | None, typer.Option(min=0, help="The same for each sequence of a step.")
    ] = None,
    answer_ms: Annotated[
        float | None, typer.Option(min=0, help="From a step's end to the client.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Run a workload of the bench on simulated engines: the real scheduler on virtual time."""
    device = find_hardware(hardware, calibration_path())
    given = {"gateway": gateway_ms, "step": loop_ms, "row": row_ms, "answer": answer_ms}
    stated = {f"{name}_seconds": ms / 1e3 for name, ms in given.items() if ms is not None}
    device = replace(device, loop=replace(device.loop, **stated))
    case = make_case(model, device, format, "auto", kv_dtype, Layout.parse(layout), skew)
    spec = ReplicaSpec(
        case,
        device,
        rows=rows,
        step_tokens=step_tokens,
        max_context=max_context,
        depth=depth,
        prefix_cache=prefix_cache,
        drafts=None if speculate == "off" else draft_law(speculate),
    )
    options = replace(options, url="simulated", model=model, devices=replicas * case.layout.devices)
    dying = None if failures is None else Failures(failures, restart)
    begin = time.perf_counter()

    def cluster(course: int) -> Cluster:
        return Cluster(
            spec,
            replicas,
            routing,
            prefill=prefill,
            course=course,
            told_after=told_after,
            handover=handover,
            failures=dying,
        )

    result, _ = Simulation(cluster(0), options).run()
    further = COURSES if options.sessions <= FEW else 0
    found = result["simulation"]["p99_bands"] = bands(cluster, options, further)
    spent = time.perf_counter() - begin
    result["server"]["model"] = model
    if as_json:
        print(json.dumps(result))
    else:
        console = Console(highlight=False)
        show_result(console, result)
        extra = result["simulation"]
        if found:
            told = (
                f"{key} {low * 1e3:,.1f} to {high * 1e3:,.1f}" for key, (low, high) in found.items()
            )
            console.print(f"p99 in {further} runs with other chances, ms: {', '.join(told)}")
        console.print(
            f"{extra['steps']} steps of {extra['replicas']} engines, "
            f"{result['seconds']:.1f} s of virtual time in {spent:.1f} s; engines busy "
            f"{min(extra['busy']):.0%} to {max(extra['busy']):.0%}; prefix hits "
            f"{extra['prefix_hit_rate']:.0%} of looked-up tokens; {extra['preemptions']} "
            f"preemptions; efficiencies {device.efficiency.source}"
        )
        if lost := extra.get("failures"):
            console.print(
                f"{lost['deaths']} replicas died, {lost['down_share']:.1%} of all replicas' time; "
                f"{lost['moved']} requests went on elsewhere, {lost['repeated_tokens']} tokens "
                f"were computed again, {lost['failed']} requests failed"
            )
        if spec.drafts is not None:
            console.print(f"drafts {spec.drafts.name}: {extra['speculation']}")
    if html is not None:
        try:
            html.write_text(html_report(result))
        except OSError as error:
            raise HeadraceError(f"{html}: {error.strerror}") from None


command = typer.Typer(help="A workload on engines that do not exist yet.")
command.command()(simulate)
