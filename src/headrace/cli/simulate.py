"""`headrace simulate`: a workload on engines that do not exist yet."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..base.errors import HeadraceError, OptionError, file_errors
from ..bench.compare import INVALID_RUN, MISSED
from ..bench.live import show_result
from ..bench.options import RunOptions
from ..bench.report import html_report
from ..engine.simulator.sim_replica import ReplicaSpec
from ..obs.progress import StatusLine
from .bench_flags import with_run_flags
from .flags import argument, flag, with_flags, writable
from .simulate_beside import play, show
from .simulate_engines import Engines, show_changes


@with_run_flags(
    only="workload trace trace_speed input output requests arrivals concurrency prefix_tokens "
    "groups zipf turns think_seconds seed slo price_per_hour",
    input="1024",
    output="256",
    requests=None,
    concurrency=64,
    seed=0,
    helps={
        "requests": "Requests of the steady part at least; none: as many as decide. A trace: at "
        "most."
    },
)
@with_flags(Engines, "engines")
def simulate(
    options: RunOptions,
    engines: Engines,
    model: Annotated[str, argument("Model, or the name of a known architecture.")],
    change: Annotated[
        list[str] | None,
        flag(
            "The same load with another value of an option of the engines, beside it, as in "
            "kv_dtype=fp8 or rows=64,depth=1; repeat it.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        flag(
            "Another model in one server with it, on this machine, and its requests one after the "
            "other, as in whisper-base:share=0.25 or all-minilm-l6-v2:input=17,at_once=8; repeat "
            "it. The gaps of each alone and together are shown.",
            metavar="MODEL[:NAME=VALUE,…]",
        ),
    ] = None,
    html: Annotated[Path | None, flag("Write the report.")] = None,
    as_json: Annotated[bool, flag("Print the result as JSON.", "--json")] = False,
) -> None:
    """Run a workload of the bench on simulated engines: the real scheduler on virtual time.

    Ramp and drain are not counted. Exit status: 3 if the SLO is missed, 4 if the figures depend on
    the length of the run.
    """
    if beside:
        show(play([model, *beside], *_sizes(options)), as_json=as_json)
        return
    writable(html, "html")
    engines = replace(engines, model=model)
    every = [("as asked", engines), *((text, engines.changed(text)) for text in change or [])]
    spec, begin = engines.spec(), time.perf_counter()
    results: list[tuple[str, dict[str, Any]]] = []
    with StatusLine(sys.stderr, f"simulating {model}") as said:
        for name, each in every:
            watch = said if name == "as asked" else partial(_of_change, said, name)
            results.append((name, each.run(options, watch)))
    result = results[0][1]
    console = Console(highlight=False, markup=False)
    if as_json:
        more = dict(results[1:])
        print(json.dumps({**result, "changes": more} if more else result))
    else:
        console.print(_asked(engines, spec, options), soft_wrap=True)
        _show(console, result, spec, time.perf_counter() - begin)
        if change:
            show_changes(console, results)
    if html is not None:
        with file_errors(HeadraceError, f"{html}"):
            html.write_text(html_report(result))
    if result["slo"] is not None and result["slo"]["met"] is False:
        raise typer.Exit(MISSED)
    if not result["valid"]:
        raise typer.Exit(INVALID_RUN)


def _span(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def _sizes(options: RunOptions) -> tuple[int, int]:
    """Return the tokens of a prompt and of an answer. Raises `OptionError` for a distribution."""
    for name in ("input", "output"):
        if not getattr(options, name).isdecimal():
            raise OptionError(f"{name} beside other models is a number of tokens", param=name)
    return int(options.input), int(options.output)


def _of_change(said: StatusLine, name: str, part: str) -> None:
    said(f"{name}: {part}")


def _asked(engines: Engines, spec: ReplicaSpec, options: RunOptions) -> str:
    """Return the question in a line: model, load and engines."""
    load = options.arrivals or f"{options.concurrency:,} users"
    lengths = f"{options.trace or options.workload} {options.input}/{options.output}"
    many = f"{engines.replicas} × " if engines.replicas > 1 else ""
    weights, cache = spec.case.weights.name, spec.case.kv_dtype
    layout = "" if engines.layout == "1" else f", {engines.layout}"
    return (
        f"{engines.model}, {lengths} tokens, {load}; {many}{spec.hardware.name}{layout}, "
        f"weights {weights}, KV {cache}"
    )


def _show(console: Console, result: dict[str, Any], spec: ReplicaSpec, spent: float) -> None:
    show_result(console, result)
    extra = result["simulation"]
    steady = extra["steady"]
    console.print(
        f"counted: {steady['requests']:,} requests from {steady['from']:,.1f} s to "
        f"{steady['to']:,.1f} s of virtual time; ramp and drain, {steady['left_out']:,} requests, "
        f"are left out ({spent:.1f} s)\n"
        f"{extra['steps']:,} steps, engines at work {_span(extra['busy'])} of the "
        f"time; prefix hits {extra['prefix_hit_rate']:.0%} of looked-up "
        f"tokens; {extra['preemptions']} preemptions\n"
        f"efficiencies: {spec.hardware.efficiency.source}",
        soft_wrap=True,
    )
    if lost := extra.get("failures"):
        console.print(
            f"{lost['deaths']} replicas died, {lost['down_share']:.1%} of all replicas' time; "
            f"{lost['moved']} requests went on elsewhere, {lost['repeated_tokens']} tokens "
            f"were computed again, {lost['failed']} requests failed",
            soft_wrap=True,
        )
    if spec.drafts is not None:
        console.print(f"drafts {spec.drafts.name}: {extra['speculation']}", soft_wrap=True)


command = typer.Typer(help="A workload on engines that do not exist yet.", add_completion=False)
command.command()(simulate)
