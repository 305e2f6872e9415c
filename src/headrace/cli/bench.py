"""`headrace bench`: measure any OpenAI-compatible server."""

from __future__ import annotations

import json
import secrets
import signal
import sys
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
from ..bench import accuracy
from ..bench import compare as comparing
from ..bench.export import aiperf, vllm_bench
from ..bench.history import History, history_chart
from ..bench.job import Target
from ..bench.lengths import parse_lengths
from ..bench.live import LiveView, show_result
from ..bench.mlperf import SCENARIOS, MlperfOptions, run_mlperf
from ..bench.mock import Behaviour, MockServer
from ..bench.options import RunOptions
from ..bench.report import html_report, result_charts
from ..bench.result import read_result
from ..bench.run import ask_server, make_material, run_bench
from ..bench.store import read_records, records_csv
from ..bench.sweep import COLUMNS, Point, Sweeper, rows, sweep_page
from ..roofline.page import charts, page
from ..roofline.plot import write_png

INVALID_RUN = 4
"""Exit code of a run whose client was the bottleneck."""

command = typer.Typer(
    help="Measure any OpenAI-compatible server.", no_args_is_help=True,
    pretty_exceptions_enable=False,
)  # fmt: skip

Url = Annotated[str, typer.Option(help="Address of the server.")]
Model = Annotated[str | None, typer.Option(help="Model name; none: the server's first.")]
Endpoint = Annotated[str | None, typer.Option(help="completions or chat; none: as needed.")]
Workload = Annotated[
    str, typer.Option(help="fixed, shared-prefix, chat, agentic, long-context, structured.")
]
Trace = Annotated[
    str | None, typer.Option(help="FORMAT:FILE; format sharegpt, mooncake, azure or burstgpt.")
]
TraceSpeed = Annotated[float, typer.Option(help="How much faster than recorded.")]
Input = Annotated[
    str, typer.Option(help="Prompt tokens: N, uniform:A:B, normal:M:S, lognormal:M:S.")
]
Output = Annotated[str, typer.Option(help="Output tokens, likewise.")]
Requests = Annotated[int, typer.Option(help="Requests (sessions, where a workload has turns).")]
Duration = Annotated[float | None, typer.Option(help="Seconds after which nothing new starts.")]
Arrive = Annotated[
    str | None,
    typer.Option(
        "--arrivals",
        help="Open loop: constant:R, poisson:R, gamma:R:B, ramp:A:B:S, trace. None: closed loop.",
    ),
]
Users = Annotated[int, typer.Option("--concurrency", "-c", help="Users of the closed loop.")]
Seed = Annotated[
    int | None,
    typer.Option(help="Of prompts, lengths and arrivals; none: a new one, kept in the result."),
]
TokenizerOf = Annotated[
    str | None,
    typer.Option("--tokenizer", help="Model whose tokenizer makes prompts of exact token counts."),
]
PrefixTokens = Annotated[int, typer.Option(help="Tokens of a shared prefix or system prompt.")]
Groups = Annotated[int, typer.Option(help="Different shared prefixes.")]
Zipf = Annotated[float, typer.Option(help="How unevenly prefixes are drawn; 0: evenly.")]
Turns = Annotated[int, typer.Option(help="Turns of a session.")]
Think = Annotated[float, typer.Option("--think", help="Mean seconds between turns.")]
Warmup = Annotated[int, typer.Option(help="Requests before the run, not counted.")]
Processes = Annotated[int, typer.Option(help="Client processes.")]
Eos = Annotated[bool, typer.Option("--ignore-eos/--eos", help="Ask for exactly the output tokens.")]
Stream = Annotated[bool, typer.Option(help="Stream the answers.")]
SloText = Annotated[
    str | None, typer.Option("--slo", help="Limits, as in ttft:p99<500ms,tpot:p95<50ms.")
]
Price = Annotated[float | None, typer.Option("--price", help="Price of one device per hour.")]
Devices = Annotated[int, typer.Option(help="Devices of the server, for figures per device.")]
Key = Annotated[str | None, typer.Option("--api-key", help="Sent as bearer token.")]
Extra = Annotated[str | None, typer.Option(help="JSON object: further fields of every request.")]
Stall = Annotated[float, typer.Option(help="Seconds without a byte that count as stalled.")]
Timeout = Annotated[float, typer.Option(help="Seconds for a whole request.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the results.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Keep = Annotated[bool, typer.Option("--history/--no-history", help="Add to the history.")]


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
    requests: Requests = 64,
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
    console = Console(stderr=as_json)
    folder = out or _default_folder("run")
    result = _measure(console, options, folder)
    _write_reports(folder, result)
    if as_json:
        print(json.dumps(result))
    else:
        show_result(console, result)
        console.print(f"report: {folder / 'report.html'}", highlight=False, soft_wrap=True)
    if history:
        _remember(console, result)
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
    requests: Requests = 64,
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
        if any(not side["valid"] for pair in pairs for side in pair):
            raise HeadraceError("a run was invalid: its client was the bottleneck")
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
    found = read_result(result)
    folder = result if result.is_dir() else result.parent
    if format == "text":
        show_result(Console(), found)
        return
    place = out or folder
    if format == "png":
        write_png(result_charts(found), place / "report.png")
        return
    records = read_records(folder / "requests.jsonl")
    start = min((record.planned_ns for record in records), default=0)
    texts: dict[str, tuple[str, Callable[[], str]]] = {
        "html": ("report.html", lambda: html_report(found)),
        "csv": ("requests.csv", lambda: records_csv(records, start)),
        "vllm": ("vllm_bench.json", lambda: json.dumps(vllm_bench(found, records))),
        "aiperf": ("profile_export_aiperf.json", lambda: json.dumps(aiperf(found), indent=1)),
    }
    if format not in texts:
        raise InvalidRequest("format must be html, png, csv, vllm, aiperf or text", param="format")
    name, make = texts[format]
    (place / name).write_text(make())
    print(place / name)


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
        table.add_column(column)
    for entry in entries:
        table.add_row(*entry[:4], f"{entry.value:.4g}")
    Console().print(table)
    if html is not None:
        body = charts([history_chart(metric, entries)])
        html.write_text(page("Headrace bench: history", metric, body))


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
    """One run with a live view; SIGTERM ends it as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with LiveView(console) as view:
            outcome = run_bench(options, folder, view.watch)
    finally:
        signal.signal(signal.SIGTERM, before)
    if outcome.problem is not None:
        console.print(f"not everything was written: {outcome.problem}", style="bold red")
    return outcome.result


def _write_reports(folder: Path, result: dict[str, Any]) -> None:
    try:
        (folder / "report.html").write_text(html_report(result))
    except OSError as error:
        sys.stderr.write(f"report.html was not written: {error.strerror}\n")


def _say_point(console: Console, point: Point) -> None:
    cells = rows([point])[0]
    console.print(
        "  ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells, strict=True)),
        highlight=False,
    )


def _finish_sweep(console: Console, folder: Path, found: list[Point], best: Point | None) -> None:
    if not found:
        return
    (folder / "report.html").write_text(sweep_page(found, best))
    (folder / "points.json").write_text(
        json.dumps([{"by": p.by, "value": p.value, "result": p.result} for p in found])
    )
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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seed-{seed}").touch()
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


@command.command("mlperf")
def mlperf_command(
    scenario: Annotated[str, typer.Argument(help=", ".join(SCENARIOS))],
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    endpoint: Endpoint = "completions",
    mode: Annotated[str, typer.Option(help="performance or accuracy.")] = "performance",
    samples: Annotated[int, typer.Option(help="Prompts in the library.")] = 64,
    input: Input = "128",
    output: Output = "128",
    seconds: Annotated[float, typer.Option(help="Shortest run; a submission needs 600.")] = 600.0,
    queries: Annotated[int, typer.Option(help="Fewest queries.")] = 1,
    qps: Annotated[float, typer.Option(help="Rate of Server and Interactive.")] = 1.0,
    ttft: Annotated[float, typer.Option(help="Limit of Server and Interactive, ms.")] = 2000.0,
    tpot: Annotated[float, typer.Option(help="Limit of Server and Interactive, ms.")] = 100.0,
    tokenizer: TokenizerOf = None,
    system: Annotated[str, typer.Option(help="Name of the system in the folders.")] = "this",
    api_key: Key = None,
    out: Out = None,
) -> None:
    """An MLPerf scenario through the real LoadGen, with its logs and its verdict."""
    base = RunOptions(url=url, model=model, api_key=api_key)
    server = ask_server(base)
    target = Target(url, model or server["model"], endpoint or "completions", api_key)
    options = MlperfOptions(
        target, scenario, mode, samples, parse_lengths(input, "input"),
        parse_lengths(output, "output"), seconds, queries, qps, ttft, tpot, system,
    )  # fmt: skip
    found = run_mlperf(options, make_material(tokenizer), out or Path("."))
    for name, value in found.summary.items():
        print(f"{name}: {value}")
    print(f"logs: {found.folder}")
    if found.failures:
        raise HeadraceError(
            f"{len(found.failures)} of {found.requests} requests failed, which LoadGen does not "
            f"know: do not use this result; for example: {found.failures[0]:.200}"
        )
    if found.valid is False:
        raise typer.Exit(INVALID_RUN)


@command.command("accuracy")
def accuracy_command(
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Text for the perplexity; none: Python's documentation.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Windows of 1,500 characters.")] = 32,
    reference: Annotated[
        Path | None, typer.Option(help="Answers to agree with, as --save wrote them.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Keep the answers as a reference.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the agreement.")] = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    at_least: Annotated[
        float, typer.Option(help="Token match below which the exit code is 3.")
    ] = 0.99,
    api_key: Key = None,
) -> None:
    """Perplexity on a text, and agreement of greedy answers with a reference run."""
    server = ask_server(RunOptions(url=url, model=model, api_key=api_key))
    target = Target(url, model or server["model"], api_key=api_key)
    console = Console()
    if corpus is None:
        text, name = accuracy.stdlib_corpus()
    else:
        try:
            text, name = corpus.read_text(), corpus.name
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{corpus}: {error}", param="corpus") from None
    found = accuracy.perplexity(target, text, name, limit=limit)
    console.print(
        f"perplexity {found.value:.4f} over {found.tokens} tokens of {found.windows} windows "
        f"({found.corpus})",
        highlight=False,
    )
    if reference is None and save is None:
        return
    if reference is not None:
        asked, expected = accuracy.load_reference(reference)
        agreed = accuracy.agreement(accuracy.answers_of(target, asked, tokens), expected)
        console.print(
            f"{agreed.equal} of {agreed.prompts} answers equal, token match "
            f"{agreed.token_match:.2%}"
            + (
                f", first difference at token {agreed.first_difference:.0f} (median)"
                if agreed.first_difference is not None
                else ""
            ),
            highlight=False,
        )
        if agreed.token_match < at_least:
            console.print(f"below {at_least:.1%} of the reference", style="bold red")
            raise typer.Exit(comparing.REGRESSED)
    if save is not None:
        asked = accuracy.default_prompts(prompts)
        accuracy.save_reference(save, asked, accuracy.answers_of(target, asked, tokens))
        console.print(f"kept {len(asked)} answers in {save}", highlight=False)
