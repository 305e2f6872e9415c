"""`headrace bench mlperf` and `headrace bench mlperf-check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..base.errors import HeadraceError, InvalidRequest
from ..bench import compare as comparing
from ..bench.gate import GATES
from ..bench.job import Target
from ..bench.lengths import parse_lengths
from ..bench.mlperf import (
    LIBRARY,
    SCENARIOS,
    SUBMISSION_SECONDS,
    SUMMARY,
    MlperfOptions,
    MlperfResult,
    configuration,
    run_mlperf,
)
from ..bench.mlperf_accuracy import compare_logs, read_log, truncate_logs
from ..bench.mlperf_compliance import TESTS
from ..bench.mlperf_samples import from_dataset, from_trace
from ..bench.mlperf_submission import UNVERIFIED, check_submission, describe_system, write_beside
from ..bench.options import RunOptions
from ..bench.run import ask_server, make_material
from .bench_flags import INVALID_RUN, Endpoint, Input, Key, Model, Out, Output, TokenizerOf, Url


def mlperf_command(
    scenario: Annotated[str, typer.Argument(help=", ".join(SCENARIOS))],
    url: Url = "http://127.0.0.1:8000",
    model: Model = None,
    endpoint: Endpoint = "completions",
    mode: Annotated[str, typer.Option(help="performance or accuracy.")] = "performance",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples; none: all of a data set or trace, else 64.")
    ] = None,
    input: Input = "128",
    output: Output = "128",
    seconds: Annotated[float, typer.Option(help="Shortest run; a submission needs 600.")] = 600.0,
    queries: Annotated[int, typer.Option(help="Fewest queries.")] = 1,
    qps: Annotated[
        float | None,
        typer.Option(
            help="Rate of Server and Interactive (none: 1); of Offline the rate that is expected "
            "(none: measured with one pass through the library)."
        ),
    ] = None,
    ttft: Annotated[float, typer.Option(help="Limit of Server and Interactive, ms.")] = 2000.0,
    tpot: Annotated[float, typer.Option(help="Limit of Server and Interactive, ms.")] = 100.0,
    tokenizer: TokenizerOf = None,
    system: Annotated[str, typer.Option(help="Name of the system in the folders.")] = "this",
    dataset: Annotated[
        Path | None,
        typer.Option(help="Samples of your own: JSON, JSON lines or parquet, as MLPerf has them."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="FORMAT:FILE: each turn of recorded sessions, with its history."),
    ] = None,
    test: Annotated[str | None, typer.Option(help=f"Compliance test: {', '.join(TESTS)}.")] = None,
    user_conf: Annotated[
        Path | None,
        typer.Option(help="LoadGen's user.conf; it and LoadGen's mlperf.conf win over flags."),
    ] = None,
    benchmark: Annotated[
        str | None, typer.Option(help="Model's name in mlperf.conf, as in llama3_1-8b.")
    ] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Log ids of tokens (return_token_ids), not text.")
    ] = False,
    eos_id: Annotated[int | None, typer.Option(help="End of text, for TEST06.")] = None,
    score: Annotated[str, typer.Option(help="rougeL or exact_match.")] = "rougeL",
    accuracy_threshold: Annotated[
        float | None, typer.Option(help="Score in per cent that TEST07 asks for.")
    ] = None,
    reference_tokens: Annotated[
        float | None, typer.Option(help="Mean tokens of the reference's answers, for TEST09.")
    ] = None,
    division: Annotated[str, typer.Option(help="open, closed or network.")] = "open",
    submitter: Annotated[str, typer.Option(help="Of the system's description.")] = "unnamed",
    reference: Annotated[
        Path | None, typer.Option(help="Folder of another system's accuracy run of these samples.")
    ] = None,
    at_least: Annotated[
        float, typer.Option(min=0, max=1, help="ROUGE-L to it below which exit is 3.")
    ] = 0.99,
    api_key: Key = None,
    out: Out = None,
) -> None:
    """An MLPerf scenario through the real LoadGen, with its logs and its verdict."""
    if reference is not None:
        if mode != "accuracy":
            raise InvalidRequest("a reference needs --mode accuracy", param="reference")
        read_log(reference)
    target = Target(url, model or "", endpoint or "completions", api_key)
    options = MlperfOptions(
        target,
        scenario,
        mode,
        samples or LIBRARY,
        parse_lengths(input, "input"),
        parse_lengths(output, "output"),
        seconds,
        queries,
        qps,
        ttft,
        tpot,
        system,
        test=test,
        user_conf=user_conf,
        benchmark=benchmark,
        token_ids=token_ids,
        end_id=eos_id,
        threshold=accuracy_threshold,
        score=score,
        reference_tokens=reference_tokens,
    )
    options.verify()
    if dataset is not None and trace is not None:
        raise InvalidRequest("samples come from a --dataset or a --trace, not both", param="trace")
    material = make_material(tokenizer)
    if dataset is not None:
        options.library = from_dataset(dataset, options.output, samples)
    elif trace is not None:
        options.library = from_trace(trace, material, samples)
    server = ask_server(RunOptions(url=url, model=model, api_key=api_key))
    target.model = model or server["model"]
    # A data set's answers end where they end: TEST09 asks how long they are.
    target.ignore_eos = options.library is None
    if options.library and any(len(sample.history) > 1 for sample in options.library):
        target.endpoint = "chat"
    root = out or Path(".")
    found = run_mlperf(options, material, root)
    place = root / "results" / system / target.model.replace("/", "_") / scenario
    about = describe_system(system, division, submitter)
    write_beside(root, place, about, configuration(options), target.model)
    _report(found, options, reference, at_least)


def _report(
    found: MlperfResult, options: MlperfOptions, reference: Path | None, at_least: float
) -> None:
    """Say what LoadGen and we found, and exit by it."""
    print((found.folder / SUMMARY).read_text())
    print(f"logs: {found.folder}")
    if options.mode == "performance" and options.min_seconds < SUBMISSION_SECONDS:
        print(
            f"LoadGen judged a run of at least {options.min_seconds:g} s, as it was told; a "
            f"submission needs {SUBMISSION_SECONDS:g} s"
        )
    print(f"by headrace, {UNVERIFIED}")
    for name, value in (found.scores or {}).items():
        print(f"{name}: {value:.3f} % against the data set")
    for verdict in found.verdicts:
        print(verdict.line + (f" ({verdict.why})" if verdict.why else ""))
    for finding in found.findings:
        print(f"{finding.severity}: {finding.text}")
    if found.failures:
        raise HeadraceError(
            f"{len(found.failures)} of {found.requests} requests failed, which LoadGen does not "
            f"know: do not use this result; for example: {found.failures[0]:.200}"
        )
    if any(finding.severity == "invalid" for finding in found.findings):
        print("INVALID, whatever LoadGen says: the numbers are not the server's")
        raise typer.Exit(INVALID_RUN)
    if found.passed is not None:
        print(f"{options.test} {'passed' if found.passed else 'FAILED'}")
        # How long a test lasts, its own settings say: LoadGen's verdict on that does not count.
        raise typer.Exit(0 if found.passed else comparing.REGRESSED)
    if found.valid is False:
        raise typer.Exit(INVALID_RUN)
    if reference is not None:
        logs = compare_logs(found.folder, reference)
        gates = ", ".join(
            f"{gate:.1%} {'passed' if logs.rouge_l >= gate else 'FAILED'}" for gate in GATES
        )
        print(
            f"{logs.equal} of {logs.samples} answers equal to the reference's, ROUGE-L "
            f"{logs.rouge_l:.2%}: {gates}"
        )
        if logs.rouge_l < at_least:
            raise typer.Exit(comparing.REGRESSED)


def mlperf_check_command(
    folder: Annotated[Path, typer.Argument(help="DIVISION/SUBMITTER: the -o of `bench mlperf`.")],
    truncate: Annotated[
        Path | None,
        typer.Option(help="First cut accuracy logs as submissions must; whole ones go here."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show what passes too.")] = False,
) -> None:
    """Is a submission whole? By the published rules and LoadGen's logs; exit code 4: it is not."""
    console = Console()
    if truncate is not None:
        done = truncate_logs(folder, truncate)
        console.print(f"{len(done)} logs cut, whole ones in {truncate}", highlight=False)
    checks = check_submission(folder)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("where", "what", "", "why"):
        table.add_column(column, overflow="fold")
    for check in checks:
        if every or not check.passed:
            why = "" if check.passed else check.why
            table.add_row(check.place, check.what, "yes" if check.passed else "NO", why)
    console.print(table)
    failed = sum(not check.passed for check in checks)
    console.print(
        f"{len(checks) - failed} of {len(checks)} checks passed; {UNVERIFIED}, whose own checker "
        "decides",
        highlight=False,
        soft_wrap=True,
    )
    if failed:
        raise typer.Exit(INVALID_RUN)
