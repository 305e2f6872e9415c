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
    SCENARIOS,
    SUBMISSION_SECONDS,
    SUMMARY,
    MlperfOptions,
    MlperfResult,
    configuration,
    run_mlperf,
)
from ..bench.mlperf_accuracy import compare_logs, read_log, truncate_logs
from ..bench.mlperf_hearing import from_sounds
from ..bench.mlperf_samples import from_dataset, from_trace
from ..bench.mlperf_submission import UNVERIFIED, check_submission, describe_system, write_beside
from ..bench.options import RunOptions
from ..bench.run import ask_server, make_material
from .bench_flags import INVALID_RUN, Out, with_flags, with_run_flags


@with_run_flags(
    only="url model endpoint input output tokenizer api_key",
    endpoint="completions",
)
@with_flags(MlperfOptions, "mlperf", lambda given: MlperfOptions(Target("", ""), **given))
def mlperf_command(
    options: RunOptions,
    mlperf: MlperfOptions,
    scenario: Annotated[str, typer.Argument(help=", ".join(SCENARIOS))],
    dataset: Annotated[
        Path | None,
        typer.Option(help="Samples of your own: JSON, JSON lines or parquet, as MLPerf has them."),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="FORMAT:FILE: each turn of recorded sessions, with its history."),
    ] = None,
    sounds: Annotated[
        Path | None,
        typer.Option(help="Whisper's: a folder of sounds, each with what is said in a .txt."),
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="Of the sounds; none: what the server hears.")
    ] = None,
    division: Annotated[str, typer.Option(help="open, closed or network.")] = "open",
    submitter: Annotated[str, typer.Option(help="Of the system's description.")] = "unnamed",
    reference: Annotated[
        Path | None, typer.Option(help="Folder of another system's accuracy run of these samples.")
    ] = None,
    at_least: Annotated[
        float, typer.Option(min=0, max=1, help="ROUGE-L to it below which exit is 3.")
    ] = 0.99,
    out: Out = None,
) -> None:
    """Run an MLPerf scenario through the real LoadGen, with its logs and its verdict."""
    if reference is not None:
        if mlperf.mode != "accuracy":
            raise InvalidRequest("a reference needs --mode accuracy", param="reference")
        read_log(reference)
    mlperf.scenario = scenario
    mlperf.input = parse_lengths(options.input, "input")
    mlperf.output = parse_lengths(options.output, "output")
    mlperf.verify()
    if sum(source is not None for source in (dataset, trace, sounds)) > 1:
        raise InvalidRequest("samples come from one of --dataset, --trace, --sounds", param="trace")
    material = make_material(options.tokenizer)
    if sounds is not None:
        if not sounds.is_dir():
            raise InvalidRequest(f"{sounds} is no folder of sounds", param="sounds")
        mlperf.library, mlperf.score = from_sounds(sounds, mlperf.samples), "word_accuracy"
        mlperf.verify()
    if dataset is not None:
        mlperf.library = from_dataset(dataset, mlperf.output, mlperf.samples)
    elif trace is not None:
        mlperf.library = from_trace(trace, material, mlperf.samples)
    server = ask_server(options)
    model = options.model or server["model"]
    # A data set's answers end at their natural end: TEST09 asks for their length.
    mlperf.target = Target(
        options.url,
        model,
        options.endpoint or "completions",
        options.api_key,
        ignore_eos=mlperf.library is None,
    )
    if mlperf.library and any(len(sample.history) > 1 for sample in mlperf.library):
        mlperf.target.endpoint = "chat"
    if mlperf.hears:
        # An answer with a sound's text comes whole and counts its tokens.
        mlperf.target.stream = False
        mlperf.target.extra = {"language": language} if language else {}
    root = out or Path(".")
    found = run_mlperf(mlperf, material, root)
    place = root / "results" / mlperf.system / model.replace("/", "_") / scenario
    about = describe_system(mlperf.system, division, submitter)
    write_beside(root, place, about, configuration(mlperf), model)
    _report(found, mlperf, reference, at_least)


def _report(
    found: MlperfResult, options: MlperfOptions, reference: Path | None, at_least: float
) -> None:
    """Print LoadGen's and our findings, and exit accordingly."""
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
        # The test's own settings decide its duration: LoadGen's verdict on that does not count.
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
    """Check a submission by the published rules and LoadGen's logs; exit code 4 if it is not
    whole."""
    console = Console(highlight=False)
    if truncate is not None:
        done = truncate_logs(folder, truncate)
        console.print(f"{len(done)} logs cut, whole ones in {truncate}")
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
        soft_wrap=True,
    )
    if failed:
        raise typer.Exit(INVALID_RUN)
