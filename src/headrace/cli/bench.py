"""`headrace bench`: measure any OpenAI-compatible server."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..base.config import parse_seconds
from ..base.errors import HeadraceError, InvalidRequest, file_errors, one_of
from ..bench import compare as comparing
from ..bench.checking import AccuracyGate, said
from ..bench.export import aiperf, vllm_bench
from ..bench.history import Entry, History, history_chart, remember, unit_of
from ..bench.limit import add_limit, limit_of
from ..bench.live import LiveView, show_result
from ..bench.mock import Behaviour, MockServer
from ..bench.options import RunOptions
from ..bench.recovery import can_recover, recover
from ..bench.report import html_report, result_charts
from ..bench.result import read_result
from ..bench.run import Outcome, run_bench
from ..bench.store import read_records, records_csv, write_text
from ..bench.sweep import COLUMNS, Point, Sweeper, read_points, rows, sweep_page
from ..engine.simulator.described import make_case
from ..roofline.hardware_files import find_hardware
from ..roofline.machine import calibration_path
from ..roofline.page import charts, page
from ..roofline.plot import write_png
from .bench_failover import failover_command
from .bench_flags import (
    EVERY_GATE,
    UNSAID,
    AsJson,
    AtLeast,
    GateFile,
    GateKinds,
    HardwareOf,
    Keep,
    Out,
    Roofline,
    default_folder,
    fresh_seed,
    with_run_flags,
)
from .bench_hearing import hear_command
from .bench_mlperf import mlperf_check_command, mlperf_command
from .bench_offline import latency_command, throughput_command
from .bench_quality import accuracy_command
from .brief import BriefHelp
from .flags import argument, flag

Beside = Annotated[
    list[Path] | None, flag("Folder of another sweep for the same charts; repeat it.")
]
command = typer.Typer(
    help="Measure any OpenAI-compatible server.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@command.command("run")
@with_run_flags()
def run_command(
    options: RunOptions,
    out: Out = None,
    as_json: AsJson = False,
    history: Keep = True,
    roofline: Roofline = None,
    hardware: HardwareOf = "this",
    accuracy_gate: GateFile = None,
    at_least: AtLeast = 0.99,
    gate: GateKinds = EVERY_GATE,
) -> None:
    """Run once: send a workload; report latency, throughput and whether to believe it."""
    options = replace(options, seed=fresh_seed(options.seed))
    console = Console(stderr=as_json, highlight=False, markup=False)
    measure = Measure(console, history, roofline, hardware)
    checks = None if accuracy_gate is None else AccuracyGate.read(accuracy_gate, gate, at_least)
    folder = out or default_folder("run")
    result, problem = measure.one(options, folder)
    if checks is not None and not result["interrupted"]:
        result["accuracy"] = checks.check(options, result)
    if problem is None:
        problem = _write_reports(folder, result)  # Before a closed pipe can end this.
    if as_json:
        print(json.dumps(result))
    else:
        show_result(console, result)
    if problem is not None:
        _say_unwritten(console, problem)
        raise typer.Exit(1)
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)
    if not result["valid"]:
        raise typer.Exit(comparing.INVALID_RUN)
    _exit_below(console, [result])


@command.command("sweep")
@with_run_flags("concurrency", "arrivals", "duration")
def sweep_command(
    options: RunOptions,
    points: Annotated[str, argument("Values, as in 1,2,4,8.")],
    by: Annotated[str, flag("concurrency or rate.")] = "concurrency",
    seconds: Annotated[
        float | None, flag("Length of each point; none: 30, or what --requests or --preset take.")
    ] = None,
    out: Out = None,
    history: Keep = True,
    beside: Beside = None,
    roofline: Roofline = None,
    hardware: HardwareOf = "this",
    accuracy_gate: GateFile = None,
    at_least: AtLeast = 0.99,
    gate: GateKinds = EVERY_GATE,
) -> None:
    """Run at several loads, with Pareto plots; an interrupted sweep resumes."""
    try:
        values = [float(value) for value in points.split(",")]
        if any(value <= 0 for value in values):
            raise ValueError
    except ValueError:
        raise InvalidRequest(
            f"points must be positive numbers joined by commas, not {points!r}", param="points"
        ) from None
    others = read_points(beside or [])
    console = Console(highlight=False, markup=False)
    folder = out or default_folder("sweep")
    measure = Measure(console, history, roofline, hardware)
    checks = None if accuracy_gate is None else AccuracyGate.read(accuracy_gate, gate, at_least)
    sweeper = _sweeper(measure, options, by, folder, seconds, checks)
    found: list[Point] = []
    for point in sweeper.sweep(values):
        found.append(point)
        _say_point(console, point)
    _finish_sweep(console, folder, found, None, others)
    _exit_below(console, [point.result for point in found])


@command.command("search")
@with_run_flags("concurrency", "arrivals", "duration", "slo")
def search_command(
    options: RunOptions,
    slo: Annotated[str, argument("Limits, as in ttft:p99<500ms,tpot:p95<50ms.")],
    by: Annotated[str, flag("concurrency or rate.")] = "concurrency",
    start: Annotated[float, flag("First value tried.")] = 1.0,
    limit: Annotated[float, flag("Largest value tried.")] = 4096.0,
    seconds: Annotated[float | None, flag("Length of each point; none: 30.")] = None,
    out: Out = None,
    history: Keep = True,
    roofline: Roofline = None,
    hardware: HardwareOf = "this",
    accuracy_gate: GateFile = None,
    at_least: AtLeast = 0.99,
    gate: GateKinds = EVERY_GATE,
) -> None:
    """Find the largest concurrency or rate that keeps an SLO."""
    if not 0 < start <= limit:
        raise InvalidRequest(
            f"start ({start:g}) must be above 0 and at most limit ({limit:g})", param="start"
        )
    console = Console(highlight=False, markup=False)
    folder = out or default_folder("search")
    measure = Measure(console, history, roofline, hardware)
    checks = None if accuracy_gate is None else AccuracyGate.read(accuracy_gate, gate, at_least)
    sweeper = _sweeper(measure, replace(options, slo=slo), by, folder, seconds, checks)
    found: list[Point] = []

    def seen(point: Point) -> None:
        found.append(point)
        _say_point(console, point)

    best = sweeper.search(seen, start=start, limit=limit)
    _finish_sweep(console, folder, found, best)
    broken = min((p for p in found if not p.kept), key=lambda p: p.value, default=None)
    if best is None and broken is not None:
        if why := broken.unjudged:
            raise HeadraceError(f"{by} {start:g} does not show whether {slo} is kept: {why}")
        raise HeadraceError(f"not even {by} {start:g} keeps {slo}", param="slo")
    if broken is not None and broken.unjudged:
        text = f"it may be more: the run at {by} {broken.value:g} does not count"
        console.print(text, style="bold red", soft_wrap=True)


def _sweeper(
    measure: Measure,
    options: RunOptions,
    by: str,
    folder: Path,
    seconds: float | None,
    gate: AccuracyGate | None,
) -> Sweeper:
    bounded = options.requests is not None or options.preset is not None
    return Sweeper(
        replace(options, seed=_sweep_seed(folder, options.seed)),
        by,
        folder,
        seconds=None if seconds is None and bounded else seconds or 30.0,
        run=measure.point,
        gate=gate,
    )


@command.command("compare")
@with_run_flags("url")
def compare_command(
    options: RunOptions,
    a: Annotated[str, argument("Address of server A, or a folder of results.")],
    b: Annotated[str, argument("Address of server B, or a folder of results.")],
    repeats: Annotated[int, flag("Pairs of runs (with addresses).")] = 5,
    tolerance: Annotated[float, flag("Ratios within this are the same.")] = 0.05,
    out: Out = None,
    history: Keep = True,
    roofline: Roofline = None,
    hardware: HardwareOf = "this",
) -> None:
    """Compare B with A, with confidence intervals; exit code 3 if B is worse."""
    console = Console(highlight=False, markup=False)
    if a.startswith("http") and b.startswith("http"):
        base = replace(options, url=a, seed=fresh_seed(options.seed))
        folder = out or default_folder("compare")
        measure = Measure(console, history, roofline, hardware)
        pairs = comparing.interleave(base, replace(base, url=b), repeats, folder, measure.point)
        late = {
            f"{number}-{name}": side["findings"][0]["text"]  # the worst first
            for number, pair in enumerate(pairs)
            for name, side in zip("ab", pair, strict=True)
            if not side["valid"]
        }
        if late:
            first, why = next(iter(late.items()))
            raise HeadraceError(
                f"no comparison: {len(late)} of {2 * len(pairs)} runs were invalid "
                f"({', '.join(late)}): {why} ({folder}/{first})"
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
    result: Annotated[Path, argument("A folder of results, or its result.json.")],
    format: Annotated[str, flag("html, png, csv, vllm, aiperf or text.")] = "text",
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
        show_result(Console(highlight=False, markup=False), found)
        return
    place = out or folder
    with file_errors(InvalidRequest, f"{place}", "out"):
        place.mkdir(parents=True, exist_ok=True)
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
    one_of(format, (*texts, "png", "text"), "format")
    name, make = texts[format]
    print(write_text(place / name, make()))


def _runs(metric: str, entries: list[Entry]) -> tuple[str, Table]:
    """Return (the metric and the runs' common values, a table of the rest)."""
    facts = ("model", "server", "commit", "workload", "load")
    rows = [
        (one.model, one.server, one.commit[:7] or "–", one.workload, one.load) for one in entries
    ]
    alike = [len({row[n] for row in rows}) == 1 for n in range(len(facts))]
    head = [f"{name} {rows[0][n]}" for n, name in enumerate(facts) if alike[n]]
    apart = [n for n, same in enumerate(alike) if not same]
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("created", *(facts[n] for n in apart), "value"):
        table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
    for entry, row in zip(entries, rows, strict=True):
        created = entry.created[:16]  # To the minute: a terminal has 80 columns.
        table.add_row(created, *(row[n] for n in apart), f"{entry.value:.4g}")
    return "; ".join([metric, *head]), table


@command.command("history")
def history_command(
    metric: Annotated[str, argument("As in output_throughput or ttft_p99.")],
    workload: Annotated[str | None, flag("Only whose name has this in it.")] = None,
    model: Annotated[str | None, flag("Likewise.")] = None,
    server: Annotated[str | None, flag("Likewise, of the server's version.")] = None,
    machine: Annotated[str | None, flag("Likewise, of the hardware.")] = None,
    commit: Annotated[str | None, flag("Likewise, of the commit of what was measured.")] = None,
    html: Annotated[Path | None, flag("Write a page with the plot.")] = None,
    database: Annotated[Path | None, flag("The DuckDB file.")] = None,
) -> None:
    """Show a metric over runs, by model, server, its commit, hardware, workload and load."""
    entries = History(database).metric(
        metric, workload=workload, model=model, server=server, machine=machine, commit=commit
    )
    Console(highlight=False, markup=False).print(*_runs(f"{metric}, {unit_of(metric)}", entries))
    if html is not None:
        body = charts([history_chart(metric, entries)])
        write_text(html, page("Headrace bench: history", metric, body))


@command.command("mock")
def mock_command(
    port: Annotated[int, flag("0 takes a free one.")] = 8000,
    ttft: Annotated[str, flag("To the first token.", metavar="TIME")] = "50ms",
    itl: Annotated[str, flag("Between tokens.", metavar="TIME")] = "10ms",
    error_rate: Annotated[float, flag("Share of requests that fail.")] = 0.0,
    at_once: Annotated[int, flag("Requests at a time; 0: no limit.")] = 0,
) -> None:
    """Serve with set latencies, to try the bench (or a router) on."""
    behaviour = Behaviour(
        ttft=parse_seconds(ttft, "ttft", bare=True),
        itl=parse_seconds(itl, "itl", bare=True),
        error_rate=error_rate,
        at_once=at_once,
    )
    with MockServer(behaviour, port) as server:
        print(server.url, flush=True)
        server.wait()


class Measure:
    """Runs, each with its share of the roofline and its place in the history."""

    def __init__(
        self, console: Console, history: bool, roofline: str | None, hardware: str
    ) -> None:
        self._console, self._history = console, history
        self._roofline = None
        if roofline is not None:
            device = find_hardware(hardware, calibration_path())
            self._roofline = make_case(roofline, device), device

    def one(self, options: RunOptions, folder: Path | None) -> tuple[dict[str, Any], str | None]:
        """Return (result, the reason why it is not written completely)."""
        outcome = _outcome(self._console, options, folder)
        result = outcome.result
        if self._roofline is not None:
            found = limit_of(outcome.run, *self._roofline)
            if found is not None:
                add_limit(result, found, *self._roofline)
        if self._history and (problem := remember(result)) is not None:
            self._console.print(problem, style="dim")
        return result, outcome.problem

    def point(self, options: RunOptions, folder: Path | None) -> dict[str, Any]:
        """Run one of several."""
        result, problem = self.one(options, folder)
        if problem is None and folder is not None and self._roofline is not None:
            problem = _write_reports(folder, result)
        if problem is not None:
            _say_unwritten(self._console, problem)
        return result


def _outcome(console: Console, options: RunOptions, folder: Path | None) -> Outcome:
    """Run once with a live view; SIGTERM ends it as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with LiveView(console) as view:
            outcome = run_bench(options, folder, view.watch)
    finally:
        signal.signal(signal.SIGTERM, before)
    return outcome


def _say_unwritten(console: Console, problem: str) -> None:
    text = f"not everything was written: {problem}"
    console.print(text, style="bold red", soft_wrap=True)


def _write_reports(folder: Path, result: dict[str, Any]) -> str | None:
    """Write the reports; return why some are missing. The numbers are shown anyway."""
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
        soft_wrap=True,
    )
    for problem in point.problems:
        console.print(f"  does not count: {problem}", style="red", markup=False, soft_wrap=True)


def _finish_sweep(
    console: Console,
    folder: Path,
    found: list[Point],
    best: Point | None,
    others: Mapping[str, list[Point]] = MappingProxyType({}),
) -> None:
    if not found:
        return
    points = json.dumps([{"by": p.by, "value": p.value, "result": p.result} for p in found])
    write_text(folder / "report.html", sweep_page(found, best, others))
    write_text(folder / "points.json", points)
    if best is not None:
        console.print(f"largest {best.by}: {best.value:g}", style="bold")
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)


def _exit_below(console: Console, results: list[dict[str, Any]]) -> None:
    """Exit with 3 if an answer's gate did not pass."""
    checked = [result["accuracy"] for result in results if result.get("accuracy")]
    for verdict in checked:
        style = None if verdict["passed"] else "bold red"
        console.print(said(verdict), style=style, soft_wrap=True)
    if not all(verdict["passed"] for verdict in checked):
        raise typer.Exit(comparing.REGRESSED)


def _sweep_seed(folder: Path, wish: int) -> int:
    """Return the seed of the points measured before, so that a sweep can resume."""
    for done in sorted(folder.glob("seed-*")):
        if wish == UNSAID:
            return int(done.name.removeprefix("seed-"))
    seed = fresh_seed(wish)
    with file_errors(InvalidRequest, f"cannot write to {folder}", "out"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"seed-{seed}").touch()
    return seed


command.command("mlperf")(mlperf_command)
command.command("mlperf-check")(mlperf_check_command)
command.command("failover")(failover_command)
command.command("accuracy")(accuracy_command)
command.command("hear")(hear_command)
command.command("throughput", cls=BriefHelp)(throughput_command)
command.command("latency", cls=BriefHelp)(latency_command)
