"""`headrace bench accuracy`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..base.errors import InvalidRequest
from ..bench import accuracy
from ..bench import compare as comparing
from ..bench.checking import deciding_kinds
from ..bench.gate import GATES, Held, hold, not_held, task_key
from ..bench.job import Target
from ..bench.options import RunOptions
from ..bench.reference import (
    Agreement,
    Reference,
    agreement,
    answers_of,
    load_reference,
    save_reference,
)
from ..bench.run import ask_server
from ..bench.tasks import load_task, score_task
from .bench_flags import EVERY_GATE, AsJson, AtLeast, GateKinds, with_run_flags
from .flags import flag


@with_run_flags(only="url model api_key concurrency", concurrency=4)
def accuracy_command(
    options: RunOptions,
    corpus: Annotated[
        Path | None, flag("Text for the perplexity; none: Python's documentation.")
    ] = None,
    limit: Annotated[int, flag("Windows of 1,500 characters; 0: no perplexity.", min=0)] = 32,
    tasks: Annotated[
        str | None, flag("Task sets: arithmetic, copying, extraction, gsm8k, gsm8k:FILE.")
    ] = None,
    items: Annotated[int, flag("Questions of each task set.", min=1)] = 50,
    reference: Annotated[Path | None, flag("What to be held against, as --save wrote it.")] = None,
    save: Annotated[Path | None, flag("Keep all as a reference.")] = None,
    prompts: Annotated[int, flag("Prompts of the agreement.", min=1)] = 16,
    tokens: Annotated[int, flag("Tokens of each answer.", min=1)] = 64,
    alternatives: Annotated[
        int, flag("Likeliest tokens whose log-probabilities are asked.", min=0)
    ] = 20,
    at_least: AtLeast = 0.99,
    gate: GateKinds = EVERY_GATE,
    as_json: AsJson = False,
) -> None:
    """Measure perplexity, task sets, and agreement (tokens, logits) with a reference run; a
    gate."""
    deciding = deciding_kinds(gate)
    names = [name.strip() for name in tasks.split(",")] if tasks else []
    sets = {name: load_task(name, items) for name in names}
    expected = None if reference is None else load_reference(reference)
    text, name = _corpus(corpus) if limit else ("", "")
    options.verify()
    users, server = options.concurrency, ask_server(options)
    target = Target(options.url, options.model or server["model"], api_key=options.api_key)
    console = Console(stderr=as_json, highlight=False, markup=False)

    found = (
        accuracy.perplexity(target, text, name, limit=limit, concurrency=users) if limit else None
    )
    if found is not None:
        console.print(
            f"perplexity {found.value:.4f} over {found.tokens} tokens of {found.windows} windows "
            f"({found.corpus})",
            soft_wrap=True,
        )
    scores = []
    for task, questions in sets.items():
        score = score_task(target, task, questions, users)
        scores.append(score)
        low, high = score.interval
        console.print(
            f"{task}: {score.right} of {score.items} right, {score.score:.1%} "
            f"({low:.1%} to {high:.1%})" + (f", {score.failed} cut off" if score.failed else ""),
            soft_wrap=True,
        )
    agreed, answers, asked = None, [], accuracy.default_prompts(prompts)
    if expected is not None:
        asked = expected.prompts
    if expected is not None or save is not None:
        answers = answers_of(target, asked, tokens, alternatives=alternatives, concurrency=users)
    held: list[Held] = []
    if expected is not None:
        agreed = agreement(answers, expected.answers, limit=tokens, reference_limit=expected.limit)
        console.print(_said(agreed), soft_wrap=True)
        held = hold(expected, agreed=agreed, perplexity=found, scores=scores)
        console.print(_gates(held))
    if save is not None:
        kept = {task_key(score.name, score.items): score.score for score in scores}
        save_reference(save, Reference(target.model, asked, answers, found, kept, tokens))
        console.print(f"kept {len(asked)} answers in {save}", soft_wrap=True)
    if as_json:
        document = {
            "schema": "headrace.bench.accuracy/1",
            "server": server,
            "perplexity": found and asdict(found),
            "tasks": [{**asdict(score), "score": score.score} for score in scores],
            "agreement": agreed and asdict(agreed),
            "held": [asdict(one) for one in held],
        }
        print(json.dumps(document))
    undecided = (
        not_held(expected, held, deciding, perplexity=found, scores=scores) if expected else []
    )
    for line in undecided:
        console.print(f"not compared: {line}", style="bold red", soft_wrap=True)
    below = [one.name for one in held if one.kind in deciding and not one.passes(at_least)]
    if below:
        console.print(
            f"below {at_least:.1%} of the reference: {', '.join(below)}", style="bold red"
        )
    if below or undecided:
        raise typer.Exit(comparing.REGRESSED)


def _corpus(path: Path | None) -> tuple[str, str]:
    if path is None:
        return accuracy.stdlib_corpus()
    try:
        return path.read_text(), path.name
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: {error}", param="corpus") from None


def _said(agreed: Agreement) -> str:
    text = f"{agreed.equal} of {agreed.prompts} answers equal, token match {agreed.token_match:.2%}"
    if agreed.first_difference is not None:
        text += f", first difference at token {agreed.first_difference:.0f} (median)"
    if agreed.kl_mean is None or agreed.kl_max is None:
        return text + "; one side tells no log-probabilities"
    return text + (
        f"; KL of the logits at least {agreed.kl_mean:.2e} nats (mean over {agreed.places} "
        f"places; most {agreed.kl_max:.2e})"
    )


def _gates(held: Sequence[Held]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("of the reference")
    for column in ("here", "reference", "share", *(f"{gate:.1%}" for gate in GATES)):
        table.add_column(column, justify="right")
    for one in held:
        marks = ("passed" if one.passes(gate) else "FAILED" for gate in GATES)
        table.add_row(
            one.name, f"{one.here:.4f}", f"{one.reference:.4f}", f"{one.share:.2%}", *marks
        )
    return table
