"""`headrace explain`: the resolved options for a model on this machine, and why."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.config import Decision, EngineOptions, ServerOptions
from ..base.hardware import hardware
from ..base.modelfiles import ModelFiles
from ..base.process import Others, busy_words
from ..engine.loop.prediction import drafts_that_pay
from ..engine.loop.start import explain as resolve
from ..loader import open_model
from ..roofline.memory import MemoryPlan
from ..speech.finding import hears
from .brief import BriefHelp
from .configured import configured
from .explain_hearing import show_hearing
from .progress import DownloadBars

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command.command(cls=BriefHelp)
@configured
def explain(
    engine: EngineOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the resolved options, the memory plan, and each decision with its reason.

    The weights are not loaded; the model's files are fetched if they are not on disk.
    """
    show(engine, None, as_json=as_json)


def show(options: EngineOptions, server: ServerOptions | None, *, as_json: bool = False) -> None:
    if hears(options.model, cache_dir=options.cache_dir, offline=options.offline):
        show_hearing(options, as_json=as_json)
        return
    others = Others()
    with DownloadBars(sys.stderr, enabled=not as_json) as bars:
        files = open_model(
            options.model, cache_dir=options.cache_dir, offline=options.offline, progress=bars
        )
    decisions, memory = resolve(options, files, hardware())
    if options.speculate != "off":
        decisions.append(drafts_that_pay(options, files))
    if as_json:
        print(json.dumps(_plain(options, server, files, decisions, memory), ensure_ascii=False))
        return
    # Names of models and values of options come from files: brackets in them are no styles.
    console = Console(highlight=False, markup=False)
    console.print(Text.assemble((files.name, "bold"), "  ", _described(files)))
    table = _table("option", "value", "why")
    decided = {decision.name: decision for decision in decisions}
    for record in (options, server):
        if record is None:
            continue
        for spec in fields(record):
            decision = decided.pop(spec.name, None)
            value = getattr(record, spec.name)
            if decision is not None:
                table.add_row(spec.name, decision.value, decision.reason)
            else:
                table.add_row(spec.name, str(value), "default" if value == spec.default else "set")
    for decision in decided.values():
        table.add_row(decision.name, decision.value, decision.reason)
    console.print(table)
    console.print(_memory(memory))
    if (busy := busy_words(others.share())) is not None:
        console.print(f"now: {busy}", soft_wrap=True)


def _described(files: ModelFiles) -> str:
    arch = files.arch
    return (
        f"{arch.family}, {files.format}, {arch.layers} layers, hidden {arch.hidden}, "
        f"{arch.heads} heads over {arch.kv_heads}, vocabulary {arch.vocab_size}, "
        f"licence {files.licence or 'unknown'}"
    )


def _memory(memory: MemoryPlan) -> Table:
    table = _table("memory", "MiB", "share")
    for name, size in memory.parts():
        table.add_row(name, f"{size / 2**20:,.1f}", f"{size / memory.available:.1%}")
    table.add_section()
    table.add_row("available", f"{memory.available / 2**20:,.1f}", "")
    table.caption = (
        f"{memory.rows} sequences at a time, {memory.kv_tokens:,} tokens of KV "
        f"({memory.full_sequences:.1f} full contexts of {memory.max_context:,})"
    )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(
            name, justify="right" if name in ("MiB", "share") else "left", no_wrap=place == 0
        )
    return table


def _plain(
    options: EngineOptions,
    server: ServerOptions | None,
    files: ModelFiles,
    decisions: list[Decision],
    memory: MemoryPlan,
) -> dict[str, Any]:
    return {
        "model": files.name,
        "format": files.format,
        "licence": files.licence,
        "arch": asdict(files.arch),
        "options": asdict(options) | (asdict(server) if server is not None else {}),
        "decisions": [asdict(decision) for decision in decisions],
        "memory": {
            "available": memory.available,
            "parts": dict(memory.parts()),
            "sequences": memory.rows,
            "max_context": memory.max_context,
            "kv_tokens": memory.kv_tokens,
        },
    }
