"""`headrace bench mlperf` and `headrace bench accuracy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..base.errors import HeadraceError, InvalidRequest
from ..bench import accuracy
from ..bench import compare as comparing
from ..bench.job import Target
from ..bench.lengths import parse_lengths
from ..bench.mlperf import SCENARIOS, MlperfOptions, run_mlperf
from ..bench.options import RunOptions
from ..bench.run import ask_server, make_material
from .bench_flags import Endpoint, Input, Key, Model, Out, Output, TokenizerOf, Url

INVALID_RUN = 4
"""Exit code of a run that says nothing about the server."""


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
