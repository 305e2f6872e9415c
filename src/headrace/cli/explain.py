"""`headrace explain`: the resolved options for a model on this machine, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.config import Decision, EngineOptions, ServerOptions
from ..base.hardware import hardware
from ..base.modelfiles import ModelFiles
from ..base.process import Others, busy_words
from ..base.several import ModelChoice, read_models
from ..engine.hearing.options import engine_options, form_of, own_options
from ..engine.loop.prediction import drafts_that_pay
from ..engine.loop.start import beside_of, keeping
from ..engine.loop.start import explain as resolve
from ..loader import open_model
from ..loader.panels import panel_folder, panel_path
from ..loader.progress import ProgressLine
from ..roofline.memory import MemoryPlan
from ..speech.finding import find, hears
from .brief import BriefHelp
from .configured import configured
from .flags import flag
from .models import size

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command.command(cls=BriefHelp)
@configured
def explain(
    models: list[str],
    engine: EngineOptions,
    as_json: Annotated[bool, flag("Print one JSON object.", "--json")] = False,
) -> None:
    """Show the resolved options, the memory plan, and each decision with its reason.

    Several models are shown as one server would have them. The weights are not loaded; the models'
    files are fetched if they are not on disk.
    """
    show(read_models(models, engine), None, as_json=as_json)


class _Explained(NamedTuple):
    options: EngineOptions
    files: ModelFiles
    decisions: list[Decision]
    memory: MemoryPlan


def show(
    chosen: Sequence[ModelChoice], server: ServerOptions | None, *, as_json: bool = False
) -> None:
    """Print the decisions of a start with these models."""
    others = Others()
    found = _explained(chosen, quiet=as_json)
    if as_json:
        each = [_plain(server, one) for one in found]
        print(json.dumps({"models": each} if len(each) > 1 else each[0], ensure_ascii=False))
        return
    # Model names and option values come from files, so brackets in them are not markup.
    console = Console(highlight=False, markup=False)
    for one in found:
        console.print(Text.assemble((one.files.name, "bold"), "  ", _described(one.files)))
        table, left = _decided(one, server if one is found[0] else None)
        console.print(table)
        console.print(f"at their defaults: {', '.join(left)}")
        console.print(_memory(one.memory))
    if (busy := busy_words(others.share())) is not None:
        console.print(f"now: {busy}", soft_wrap=True)


def _explained(chosen: Sequence[ModelChoice], *, quiet: bool) -> list[_Explained]:
    with ProgressLine(sys.stderr, enabled=not quiet) as bars:
        opened = [open_choice(one, bars, shared=len(chosen) > 1) for one in chosen]
    files = [one.files for one in opened]
    found: list[_Explained] = []
    for place, (serving, one, decided) in enumerate(opened):
        plans = [each.memory for each in found]
        beside = beside_of(plans, files[place + 1 :], keeping(files))
        decisions, memory = resolve(serving, one, hardware(), beside)
        if serving.speculate != "off":
            decisions.append(drafts_that_pay(serving, one))
        found.append(_Explained(serving, one, [*decisions, *decided, _disk(serving, one)], memory))
    return found


def _disk(options: EngineOptions, files: ModelFiles) -> Decision:
    """Return the disk space that a start needs."""
    kept, why = panel_path(files, panel_folder(options.cache_dir)), "the weights"
    if kept.is_file():
        why += f"; beside them {size(kept.stat().st_size)}, repacked for the next start"
    elif options.keep_packed:
        why += "; a CPU's first start adds their repacked form, about as much at most"
    return Decision("disk", size(sum(path.stat().st_size for path in files.weights)), why)


class OpenedChoice(NamedTuple):
    options: EngineOptions
    files: ModelFiles
    decisions: list[Decision]
    """Decisions in addition to those of every model."""


def open_choice(choice: ModelChoice, bars: ProgressLine, *, shared: bool) -> OpenedChoice:
    """Open a model. Raises the errors of `own_options`, `find` and of the files."""
    options = choice.options
    where: dict[str, Any] = {"cache_dir": options.cache_dir, "offline": options.offline}
    if not hears(options.model, **where):
        return OpenedChoice(options, open_model(options.model, progress=bars, **where), [])
    # Local: imports the tokenizers, which no other explanation needs.
    from ..loader.whisper import open_transcription

    options = own_options(choice, shared=shared)
    form = form_of(options)
    folder = find(options.model, progress=bars, **where)
    files = open_transcription(folder, coded=form.precision == "int8")
    return OpenedChoice(
        engine_options(options, form), replace(files, name=options.model), form.decisions
    )


def _decided(one: _Explained, server: ServerOptions | None) -> tuple[Table, list[str]]:
    """Return what was decided or set, and the names of the other options."""
    table, left = _table("option", "value", "why"), []
    decided = {decision.name: decision for decision in one.decisions}
    for record in (one.options, server):
        if record is None:
            continue
        for spec in fields(record):
            decision = decided.pop(spec.name, None)
            value = getattr(record, spec.name)
            if decision is not None:
                table.add_row(spec.name, decision.value, decision.reason)
            elif value == spec.default:
                left.append(spec.name)
            else:
                table.add_row(spec.name, str(value), "set")
    for decision in decided.values():
        table.add_row(decision.name, decision.value, decision.reason)
    return table, left


def _described(files: ModelFiles) -> str:
    arch = files.arch
    return (
        f"{arch.family}, {files.format}, {arch.layers} layers, hidden {arch.hidden}, "
        f"{arch.heads} heads over {arch.kv_heads}, vocabulary {arch.vocab_size}, "
        f"licence {files.licence or 'unknown'}"
    )


def _memory(memory: MemoryPlan) -> Table:
    table = _table("memory", "MiB", "share")
    for name, count in memory.parts():
        table.add_row(name, f"{count / 2**20:,.1f}", f"{count / memory.available:.1%}")
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


def _plain(server: ServerOptions | None, one: _Explained) -> dict[str, Any]:
    options, files, decisions, memory = one
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
