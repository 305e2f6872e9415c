"""`headrace bench throughput` and `headrace bench latency`: an engine in this process, no HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..base.config import EngineOptions
from ..bench.compare import INVALID_RUN
from ..bench.history import remember
from ..bench.limit import add_limit, limit_of
from ..bench.live import show_result
from ..bench.metrics import Run
from ..bench.offline import OfflineBench
from ..bench.options import RunOptions
from ..bench.record import RequestRecord
from ..bench.report import html_report
from ..bench.store import Store
from ..engine.simulator.described import make_case
from ..roofline.hardware_files import find_hardware
from ..roofline.machine import calibration_path
from .bench_flags import AsJson, Keep, Out, default_folder, fresh_seed, with_run_flags
from .configured import configured
from .flags import flag

Beside = Annotated[bool, flag("Put the roofline of model and machine beside it.", "--roofline")]
Asked = Callable[[OfflineBench, Callable[[RequestRecord], None]], tuple[dict[str, Any], Run]]


BOTH = "input output seed slo metrics_interval"


@configured
@with_run_flags(
    only="workload trace requests prefix_tokens groups zipf temperature devices price_per_hour "
    + BOTH,
    input="1024",
)
def throughput_command(
    options: RunOptions,
    engine: EngineOptions,
    out: Out = None,
    as_json: AsJson = False,
    history: Keep = True,
    roofline: Beside = False,
) -> None:
    """Measure tokens a second of an engine in this process, with all requests there at once."""
    ask = OfflineBench.throughput
    _measure(engine, options, ask, out, as_json=as_json, history=history, roofline=roofline)


@configured
@with_run_flags(only=BOTH, input="32")
def latency_command(
    options: RunOptions,
    engine: EngineOptions,
    batch: Annotated[int, flag("Requests at once.", min=1)] = 8,
    iterations: Annotated[int, flag("Batches, one after the other.", min=1)] = 10,
    out: Out = None,
    as_json: AsJson = False,
    history: Keep = True,
    roofline: Beside = False,
) -> None:
    """Time a batch in an engine of this process, repeatedly."""
    options = replace(options, requests=batch * iterations, concurrency=batch)
    ask = partial(OfflineBench.latency, batch=batch)
    _measure(engine, options, ask, out, as_json=as_json, history=history, roofline=roofline)


def _measure(
    engine: EngineOptions,
    options: RunOptions,
    ask: Asked,
    out: Path | None,
    *,
    as_json: bool,
    history: bool,
    roofline: bool,
) -> None:
    console = Console(stderr=as_json, highlight=False, markup=False)
    options.url, options.model, options.tokenizer = "in-process", engine.model, engine.model
    options.endpoint, options.seed = "completions", fresh_seed(options.seed)
    place = None
    if roofline:
        device = find_hardware("this", calibration_path())
        place = make_case(engine.model, device), device
    folder = out or default_folder("offline")
    store = Store(folder)
    try:
        console.print(f"loading {engine.model}", style="dim")
        with OfflineBench(engine, options) as bench:
            begin = time.monotonic()
            result, run = ask(bench, store.record)
            spent = time.monotonic() - begin
        found = None if place is None else limit_of(run, *place)
        if found is not None and place is not None:
            add_limit(result, found, *place)
        store.json("result.json", result)
        store.text("report.html", html_report(result))
    finally:
        store.close()
    if history and (problem := remember(result)) is not None:
        console.print(problem, style="dim")
    if as_json:
        print(json.dumps(result))
    else:
        show_result(console, result)
    console.print(f"{result['kind']}: {spent:.1f} s with the warm-up")
    if store.problem is not None:
        console.print(f"not everything was written: {store.problem}", style="bold red")
        raise typer.Exit(1)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
    if not result["valid"]:
        raise typer.Exit(INVALID_RUN)
