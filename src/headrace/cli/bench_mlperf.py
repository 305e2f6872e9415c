"""`headrace bench mlperf` and `headrace bench mlperf-check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..base.errors import InvalidRequest
from ..bench.compare import INVALID_RUN
from ..bench.job import Target
from ..bench.lengths import parse_lengths
from ..bench.mlperf import SCENARIOS, MlperfOptions, configuration, run_mlperf
from ..bench.mlperf_accuracy import read_log, truncate_logs
from ..bench.mlperf_hearing import from_sounds
from ..bench.mlperf_samples import from_dataset, from_trace
from ..bench.mlperf_submission import UNVERIFIED, check_submission, describe_system, write_beside
from ..bench.mlperf_verdict import findings, judged
from ..bench.options import RunOptions
from ..bench.run import ask_server, make_material
from .bench_flags import Out, with_run_flags
from .flags import argument, flag, with_flags

MODES, BOTH = ("accuracy", "performance"), "both"
"""Modes of `--mode both`, in their order."""


@with_run_flags(
    only="url model endpoint input output tokenizer api_key",
    endpoint="completions",
)
@with_flags(MlperfOptions, "mlperf", lambda given: MlperfOptions(Target("", ""), **given))
def mlperf_command(
    options: RunOptions,
    mlperf: MlperfOptions,
    scenario: Annotated[str, argument(", ".join(SCENARIOS))],
    dataset: Annotated[
        Path | None, flag("Samples of your own: JSON, JSON lines or parquet, as MLPerf has them.")
    ] = None,
    trace: Annotated[
        str | None, flag("FORMAT:FILE: each turn of recorded sessions, with its history.")
    ] = None,
    sounds: Annotated[
        Path | None, flag("Whisper's: a folder of sounds, each with what is said in a .txt.")
    ] = None,
    language: Annotated[str | None, flag("Of the sounds; none: what the server hears.")] = None,
    division: Annotated[str, flag("open, closed or network.")] = "open",
    submitter: Annotated[str, flag("Of the system's description.")] = "unnamed",
    reference: Annotated[
        Path | None, flag("Folder of another system's accuracy run of these samples.")
    ] = None,
    at_least: Annotated[float, flag("ROUGE-L to it below which exit is 3.", min=0, max=1)] = 0.99,
    out: Out = None,
) -> None:
    """Run an MLPerf scenario through the real LoadGen, with its logs and its verdict."""
    modes = MODES if mlperf.mode == BOTH else (mlperf.mode,)
    mlperf.mode = modes[0]
    if reference is not None:
        if "accuracy" not in modes:
            raise InvalidRequest("a reference needs --mode accuracy or both", param="reference")
        read_log(reference)
    if mlperf.test is not None and len(modes) > 1:
        raise InvalidRequest("a compliance test is a performance run", param="mode")
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
    # A data set's answers stop at their natural end, since TEST09 checks their length.
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
        # A sound's answer with its text comes whole and counts its tokens.
        mlperf.target.stream = False
        mlperf.target.extra = {"language": language} if language else {}
    root = out or Path(".")
    place = root / "results" / mlperf.system / model.replace("/", "_") / scenario
    about = describe_system(mlperf.system, division, submitter)
    worst = 0
    for mlperf.mode in modes:
        found = run_mlperf(mlperf, material, root)
        write_beside(root, place, about, configuration(mlperf), model)
        print(*findings(found, mlperf), sep="\n")
        held = reference if mlperf.mode == "accuracy" else None
        lines, code = judged(found, mlperf, held, at_least)
        print(*lines, sep="\n", end="\n" if lines else "")
        worst = max(worst, code)
    if worst:
        raise typer.Exit(worst)


def mlperf_check_command(
    folder: Annotated[Path, argument("DIVISION/SUBMITTER: the -o of `bench mlperf`.")],
    truncate: Annotated[
        Path | None, flag("First cut accuracy logs as submissions must; whole ones go here.")
    ] = None,
    every: Annotated[bool, flag("Show what passes too.", "--all")] = False,
) -> None:
    """Check a submission by the published rules and LoadGen's logs; exit code 4 if it is not
    whole."""
    console = Console(highlight=False, markup=False)
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
