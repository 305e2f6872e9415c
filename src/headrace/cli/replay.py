"""`headrace replay`: recorded requests answered again; exit status 1 if an answer differs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..base.config import EngineOptions
from ..base.errors import InvalidRequest
from ..base.identity import Identity
from ..engine.clients.records import CARRIED, Record, read_records, records_of_dump
from ..engine.clients.replay import Verdict, replay
from ..engine.loop.build import Built, build
from ..loader import open_model
from ..obs.progress import TokenProgress
from ..text import Tokenizer, load_tokenizer
from .flags import argument, flag

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
DIFFERENT = 1
"""Exit status if an answer differs."""


@command.command()
def main(
    file: Annotated[
        Path,
        argument(
            "Records (written where HEADRACE_RECORD=FOLDER is set), or a dump of the flight "
            "recorder that names them: then what the failure cut off is replayed."
        ),
    ],
    model: Annotated[str | None, flag("Take this model in place of the recorded one.")] = None,
    last: Annotated[int | None, flag("Replay only so many of the newest records.", min=1)] = None,
    threads: Annotated[int | None, flag("As of `headrace serve`.", min=1)] = None,
    as_json: Annotated[bool, flag("Print one JSON object.", "--json")] = False,
) -> None:
    """Answer recorded requests again and compare every token and log-probability.

    An answer depends on the weights, options, kernels and version in its record. A difference in
    one of them here is named. Without any, every bit must be equal, whatever else is in the batch.
    Exit status 1 if an answer differs.
    """
    dumped = records_of_dump(file)
    records = [
        record
        for record in read_records(dumped or file)
        if dumped is None or record.cut is not None
    ]
    if not records:
        raise InvalidRequest(f"{file} holds no record to replay", param="file")
    records = records[-last:] if last else records
    verdicts: list[Verdict] = []
    differences: list[str] = []
    exact = True
    for group in _by_engine(records):
        with _engine(group[0], model, threads) as engine:
            exact &= engine.identity.exact
            for record in group:
                differences += record.identity.differences(engine.identity)
            verdicts += engine.answer(group, quiet=as_json)
    differences = list(dict.fromkeys(differences))
    report: dict[str, Any] = {
        "records": len(verdicts),
        "equal": sum(verdict.equal for verdict in verdicts),
        "tokens": sum(verdict.tokens for verdict in verdicts),
        "identity": differences,
        "exact": exact,
        "different": [
            _described(number, one) for number, one in enumerate(verdicts, 1) if not one.equal
        ],
    }
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        _show(report)
    if report["different"]:
        raise typer.Exit(DIFFERENT)


class _Engine:
    """One engine for records with the same model and options; a context manager."""

    def __init__(self, built: Built, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._built = built
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    @property
    def identity(self) -> Identity:
        return self._built.identity

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._built.close()

    def answer(self, records: list[Record], *, quiet: bool) -> list[Verdict]:
        """Load the adapters named in the records, and replay."""
        loaded = {}
        for record in records:
            name, folder = record.spec.adapter, record.adapter
            if name is not None and folder is not None and name not in loaded:
                loaded[name] = folder
                self._built.core.load_adapter(name, folder)
        with TokenProgress(len(records), enabled=not quiet) as progress:
            return replay(
                self._built.core,
                self._tokenizer,
                records,
                vocab_size=self._vocab_size,
                on_token=progress.tokens,
                on_end=progress.done,
            )


def _engine(record: Record, model: str | None, threads: int | None) -> _Engine:
    options = EngineOptions(model=model or record.model, threads=threads, max_waiting=1 << 20)
    for name, value in record.options.items():
        if name not in CARRIED:
            raise InvalidRequest(f"a record holds no option {name!r:.40}", param="file")
        setattr(options, name, value)
    options.verify()
    files = open_model(options.model)
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    return _Engine(build(options, files), tokenizer, files.arch.vocab_size)


def _by_engine(records: Iterable[Record]) -> list[list[Record]]:
    """Group records that one engine can answer, in the order of their first ones."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        key = json.dumps([record.model, record.options], sort_keys=True)
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def _described(number: int, verdict: Verdict) -> dict[str, Any]:
    difference = verdict.difference
    return {
        "record": number,
        "prompt_tokens": len(verdict.record.prompt),
        "choice": None if difference is None else difference.choice,
        "token": None if difference is None else difference.place,
        "what": verdict.refused if difference is None else difference.what,
    }


def _show(report: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    if report["different"]:
        table = Table("record", "prompt", "choice", "token", "what", box=None)
        for one in report["different"]:
            table.add_row(*("" if value is None else str(value) for value in one.values()))
        console.print(table)
    for line in report["identity"]:
        console.print(f"differs from the recorded engine: {line}")
    console.print(
        f"{report['equal']} of {report['records']} answers are equal bit for bit, "
        f"{report['tokens']} tokens compared"
    )
    if report["different"] and not report["identity"]:
        console.print(
            "Nothing that an answer depends on differs: this breaks what Headrace promises. "
            "Please report it with the record."
            if report["exact"]
            else "A GPU promises equal bits only with --deterministic."
        )
