"""`headrace bench`: measure any OpenAI-compatible server."""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..base.errors import HeadraceError, InvalidRequest
from ..bench import compare as comparing
from ..bench.export import aiperf, vllm_bench
from ..bench.history import History, history_chart
from ..bench.limit import add_limit, limit_of
from ..bench.live import LiveView, show_result
from ..bench.mock import Behaviour, MockServer
from ..bench.options import RunOptions
from ..bench.recovery import can_recover, recover
from ..bench.report import html_report, result_charts
from ..bench.result import read_result
from ..bench.run import Outcome, run_bench
from ..bench.store import read_records, records_csv, write_text
from ..bench.sweep import COLUMNS, Point, Sweeper, rows, sweep_page
from ..engine.described import make_case
from ..roofline.hardware import find_hardware
from ..roofline.machine import calibration_path
from ..roofline.page import charts, page
from ..roofline.plot import write_png
from .bench_flags import (
    Arrive,
    AsJson,
    Devices,
    Duration,
    Endpoint,
    Eos,
    Extra,
    Groups,
    Input,
    Keep,
    Key,
    Model,
    Out,
    Output,
    PrefixTokens,
    Price,
    Processes,
    Requests,
    Seed,
    SloText,
    Stall,
    Stream,
    Think,
    Timeout,
    TokenizerOf,
    Trace,
    TraceSpeed,
    Turns,
    Url,
    Users,
    Warmup,
    Workload,
    Zipf,
)
from .bench_quality import INVALID_RUN, accuracy_command, mlperf_command

command = typer.Typer(
    help="Measure any OpenAI-compatible server.", no_args_is_help=True,
    pretty_exceptions_enable=False,
)  # fmt: skip


@command.command("run")
def run_command(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    endpoint: Endpoint = None,
    workload: Workload = "fixed",
    trace: Trace = None,
    trace_speed: TraceSpeed = 1.0,
    input: Input = "128",
    output: Output = "128",
    requests: Requests = None,
    duration: Duration = None,
    arrivals: Arrive = None,
    concurrency: Users = 8,
    seed: Seed = None,
    tokenizer: TokenizerOf = None,
    prefix_tokens: PrefixTokens = 1024,
    groups: Groups = 8,
    zipf: Zipf = 1.0,
    turns: Turns = 4,
    think: Think = 2.0,
    warmup: Warmup = 2,
    processes: Processes = 1,
    ignore_eos: Eos = True,
    stream: Stream = True,
    slo: SloText = None,
    timeout: Timeout = 600.0,
    stall: Stall = 60.0,
    devices: Devices = 1,
    price: Price = None,
    api_key: Key = None,
    extra: Extra = None,
    out: Out = None,
    as_json: AsJson = False,
    history: Keep = True,
    roofline: Annotated[
        str | None, typer.Option(help="Model whose roofline is put beside the run.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="What the server runs on: this, H100, H200 …")
    ] = "this",
) -> None:
    """One run: send a workload, report latency, throughput and whether to believe it."""
    options = RunOptions(
        url=url, model=model, endpoint=endpoint, workload=workload, trace=trace,
        trace_speed=trace_speed, input=input, output=output, requests=requests, duration=duration,
        arrivals=arrivals, concurrency=concurrency, seed=_seed(seed), tokenizer=tokenizer,
        prefix_tokens=prefix_tokens, groups=groups, zipf=zipf, turns=turns, think_seconds=think,
        warmup=warmup, processes=processes, ignore_eos=ignore_eos, stream=stream, slo=slo,
        timeout=timeout, stall=stall, devices=devices, price_per_hour=price, api_key=api_key,
        extra=_object(extra),
    )  # fmt: skip
    case = device = None
    if roofline is not None:
        device = find_hardware(hardware, calibration_path())
        case = make_case(roofline, device)
    console = Console(stderr=as_json)
    folder = out or _default_folder("run")
    outcome = _outcome(console, options, folder)
    result = outcome.result
    if case is not None and device is not None:
        found = limit_of(outcome.run, case, device)
        if found is not None:
            add_limit(result, found, case, device)
    problem = outcome.problem
    if problem is None:
        problem = _write_reports(folder, result)  # Before a closed pipe can end this.
    if history:
        _remember(console, result)
    if as_json:
        print(json.dumps(result))
    else:
        show_result(console, result)
    if problem is not None:
        _say_unwritten(console, problem)
        raise typer.Exit(1)
    console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    if not result["valid"]:
        raise typer.Exit(INVALID_RUN)


@command.command("sweep")
def sweep_command(
    points: Annotated[str, typer.Argument(help="Values, as in 1,2,4,8.")],
    by: Annotated[str, typer.Option(help="concurrency or rate.")] = "concurrency",
    seconds: Annotated[float, typer.Option(help="Length of each point.")] = 30.0,
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    workload: Workload = "fixed",
    input: Input = "128",
    output: Output = "128",
    tokenizer: TokenizerOf = None,
    slo: SloText = None,
    processes: Processes = 1,
    api_key: Key = None,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """Runs at several loads, with a Pareto plot; goes on where it was interrupted."""
    try:
        values = [float(value) for value in points.split(",")]
        if any(value <= 0 for value in values):
            raise ValueError
    except ValueError:
        raise InvalidRequest(
            f"points must be positive numbers joined by commas, not {points!r}", param="points"
        ) from None
    console = Console()
    folder = out or _default_folder("sweep")
    base = RunOptions(
        url=url, model=model, workload=workload, input=input, output=output, tokenizer=tokenizer,
        slo=slo, processes=processes, api_key=api_key, seed=_sweep_seed(folder, seed),
    )  # fmt: skip
    sweeper = Sweeper(
        base, by, folder, seconds=seconds,
        run=lambda options, place: _measure(console, options, place),
    )  # fmt: skip
    found: list[Point] = []
    for point in sweeper.sweep(values):
        found.append(point)
        _say_point(console, point)
    _finish_sweep(console, folder, found, None)


@command.command("search")
def search_command(
    slo: Annotated[str, typer.Argument(help="Limits, as in ttft:p99<500ms,tpot:p95<50ms.")],
    by: Annotated[str, typer.Option(help="concurrency or rate.")] = "concurrency",
    start: Annotated[float, typer.Option(help="First value tried.")] = 1.0,
    limit: Annotated[float, typer.Option(help="Largest value tried.")] = 4096.0,
    seconds: Annotated[float, typer.Option(help="Length of each point.")] = 30.0,
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    workload: Workload = "fixed",
    input: Input = "128",
    output: Output = "128",
    tokenizer: TokenizerOf = None,
    processes: Processes = 1,
    api_key: Key = None,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """The largest concurrency or rate that keeps an SLO."""
    console = Console()
    folder = out or _default_folder("search")
    base = RunOptions(
        url=url, model=model, workload=workload, input=input, output=output, tokenizer=tokenizer,
        slo=slo, processes=processes, api_key=api_key, seed=_sweep_seed(folder, seed),
    )  # fmt: skip
    sweeper = Sweeper(
        base, by, folder, seconds=seconds,
        run=lambda options, place: _measure(console, options, place),
    )  # fmt: skip
    found: list[Point] = []

    def seen(point: Point) -> None:
        found.append(point)
        _say_point(console, point)

    best = sweeper.search(seen, start=start, limit=limit)
    _finish_sweep(console, folder, found, best)
    if best is None:
        raise HeadraceError(f"not even {by} {start:g} keeps {slo}", param="slo")


@command.command("compare")
def compare_command(
    a: Annotated[str, typer.Argument(help="Address of server A, or a folder of results.")],
    b: Annotated[str, typer.Argument(help="Address of server B, or a folder of results.")],
    repeats: Annotated[int, typer.Option(help="Pairs of runs (with addresses).")] = 5,
    tolerance: Annotated[float, typer.Option(help="Ratios within this are the same.")] = 0.05,
    workload: Workload = "fixed",
    input: Input = "128",
    output: Output = "128",
    requests: Requests = None,
    concurrency: Users = 8,
    tokenizer: TokenizerOf = None,
    model: Model = None,
    api_key: Key = None,
    out: Out = None,
) -> None:
    """B against A with confidence intervals; exit code 3 where B is worse."""
    console = Console()
    if a.startswith("http") and b.startswith("http"):
        base = RunOptions(
            url=a, model=model, workload=workload, input=input, output=output, requests=requests,
            concurrency=concurrency, tokenizer=tokenizer, api_key=api_key, seed=_seed(None),
        )  # fmt: skip
        folder = out or _default_folder("compare")
        pairs = comparing.interleave(
            base, replace(base, url=b), repeats, folder,
            lambda options, place: _measure(console, options, place),
        )  # fmt: skip
        late = [
            f"{number}-{name}"
            for number, pair in enumerate(pairs)
            for name, side in zip("ab", pair, strict=True)
            if not side["valid"]
        ]
        if late:
            raise HeadraceError(
                f"no comparison: {len(late)} of {2 * len(pairs)} runs were invalid "
                f"({', '.join(late)}): `headrace bench report {folder}/{late[0]}` says why"
            )
        if len(pairs) < 2:
            raise HeadraceError(
                f"no comparison: interrupted after {len(pairs)} of {repeats} pairs, an interval "
                f"needs 2; what was measured is in {folder}"
            )
        compared = comparing.compare_pairs(pairs, tolerance)
    else:
        compared = comparing.compare_single(Path(a), Path(b), tolerance)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("B / A", "ratio", "low", "high", "verdict"):
        table.add_column(column, justify="left" if column == "B / A" else "right")
    for row in comparing.rows(compared):
        table.add_row(*row)
    console.print(table)
    if comparing.regressed(compared):
        console.print("B is worse than A", style="bold red")
        raise typer.Exit(comparing.REGRESSED)


@command.command("report")
def report_command(
    result: Annotated[Path, typer.Argument(help="A folder of results, or its result.json.")],
    format: Annotated[str, typer.Option(help="html, png, csv, vllm, aiperf or text.")] = "text",
    out: Out = None,
) -> None:
    """Write a result again in another form."""
    folder = result if result.is_dir() else result.parent
    try:
        found = read_result(result)
    except InvalidRequest:
        if not can_recover(folder):
            raise
        found = recover(folder)
    if format == "text":
        show_result(Console(), found)
        return
    place = out or folder
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"{place}: {error.strerror or error}", param="out") from None
    if format == "png":
        write_png(result_charts(found), place / "report.png")
        return
    records = read_records(folder / "requests.jsonl")
    start = min((record.planned_ns for record in records), default=0)
    texts: dict[str, tuple[str, Callable[[], str]]] = {
        "html": ("report.html", lambda: html_report(found)),
        "csv": ("requests.csv", lambda: records_csv(records, start)),
        "vllm": ("vllm_bench.json", lambda: json.dumps(vllm_bench(found, records))),
        "aiperf": (
            "profile_export_aiperf.json",
            lambda: json.dumps(aiperf(found, records), indent=1),
        ),
    }
    if format not in texts:
        raise InvalidRequest("format must be html, png, csv, vllm, aiperf or text", param="format")
    name, make = texts[format]
    print(write_text(place / name, make()))


@command.command("history")
def history_command(
    metric: Annotated[str, typer.Argument(help="As in output_throughput or ttft_p99.")],
    workload: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the plot.")] = None,
    database: Annotated[Path | None, typer.Option(help="The DuckDB file.")] = None,
) -> None:
    """A metric over runs and commits."""
    entries = History(database).metric(metric, workload)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("created", "commit", "workload", "load", metric):
        table.add_column(column, overflow="fold")
    for entry in entries:
        # By the minute, and the commit as short as git's own: a terminal has 80 columns.
        created, commit = entry.created[:16], entry.commit[:9]
        table.add_row(created, commit, entry.workload, entry.load, f"{entry.value:.4g}")
    Console().print(table)
    if html is not None:
        body = charts([history_chart(metric, entries)])
        write_text(html, page("Headrace bench: history", metric, body))


@command.command("mock")
def mock_command(
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    ttft: Annotated[float, typer.Option(help="Seconds to the first token.")] = 0.05,
    itl: Annotated[float, typer.Option(help="Seconds between tokens.")] = 0.01,
    error_rate: Annotated[float, typer.Option(help="Share of requests that fail.")] = 0.0,
    slots: Annotated[int, typer.Option(help="Requests at a time; 0: no limit.")] = 0,
) -> None:
    """A server with set latencies, to try the bench (or a router) on."""
    behaviour = Behaviour(ttft=ttft, itl=itl, error_rate=error_rate, slots=slots)
    with MockServer(behaviour, port) as server:
        print(server.url, flush=True)
        server.wait()


def _measure(console: Console, options: RunOptions, folder: Path | None) -> dict[str, Any]:
    outcome = _outcome(console, options, folder)
    if outcome.problem is not None:
        _say_unwritten(console, outcome.problem)
    return outcome.result


def _outcome(console: Console, options: RunOptions, folder: Path | None) -> Outcome:
    """One run with a live view; SIGTERM ends it as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with LiveView(console) as view:
            outcome = run_bench(options, folder, view.watch)
    finally:
        signal.signal(signal.SIGTERM, before)
    return outcome


def _say_unwritten(console: Console, problem: str) -> None:
    text = f"not everything was written: {problem}"
    console.print(text, style="bold red", highlight=False, soft_wrap=True)


def _write_reports(folder: Path, result: dict[str, Any]) -> str | None:
    """→ why not everything was written; the numbers are shown all the same."""
    try:
        write_text(folder / "result.json", json.dumps(result, indent=1))
        write_text(folder / "report.html", html_report(result))
    except HeadraceError as error:
        return error.message
    return None


def _say_point(console: Console, point: Point) -> None:
    cells = rows([point])[0]
    console.print(
        "  ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells, strict=True)),
        highlight=False,
        soft_wrap=True,
    )


def _finish_sweep(console: Console, folder: Path, found: list[Point], best: Point | None) -> None:
    if not found:
        return
    points = json.dumps([{"by": p.by, "value": p.value, "result": p.result} for p in found])
    write_text(folder / "report.html", sweep_page(found, best))
    write_text(folder / "points.json", points)
    if best is not None:
        console.print(f"largest {best.by}: {best.value:g}", style="bold", highlight=False)
    console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)


def _remember(console: Console, result: dict[str, Any]) -> None:
    try:
        History().add(result)
    except HeadraceError as error:
        console.print(error.message, style="dim")


def _default_folder(kind: str) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("bench-results") / f"{kind}-{stamp}-{time.monotonic_ns() % 1000:03d}"


def _seed(wish: int | None) -> int:
    """A fresh one by default: prompts of an earlier run would be in the server's prefix cache."""
    return secrets.randbelow(10**6) if wish is None else wish


def _sweep_seed(folder: Path, wish: int | None) -> int:
    """That of the points that are there already, so that a sweep can go on."""
    for done in sorted(folder.glob("seed-*")):
        if wish is None:
            return int(done.name.removeprefix("seed-"))
    seed = _seed(wish)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"seed-{seed}").touch()
    except OSError as error:
        raise InvalidRequest(
            f"cannot write to {folder}: {error.strerror or error}", param="out"
        ) from None
    return seed


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"extra is not JSON: {error}", param="extra") from None
    if not isinstance(value, dict):
        raise InvalidRequest("extra must be a JSON object", param="extra")
    return value


command.command("mlperf")(mlperf_command)
command.command("accuracy")(accuracy_command)
