"""`headrace explain` of a Whisper: its options with reasons, and the memory of its parts."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.config import EngineOptions
from ..base.hardware import cpu
from ..engine.hearing.options import form_of, of_whisper, verify
from ..roofline.hearing import hearing_memory
from ..speech.files import open_whisper
from ..speech.finding import find
from ..speech.opening import room_here


def show_hearing(options: EngineOptions, *, as_json: bool = False) -> None:
    """Print tables, or one JSON object. Raises the errors of `verify`, `find` and `open_whisper`,
    and `DoesNotFit`."""
    verify(options)
    folder = find(options.model, cache_dir=options.cache_dir, offline=options.offline)
    files, form, available = open_whisper(folder), form_of(options), cpu().available
    room = room_here(files, form.precision, form.kv)
    decisions = [*form.decisions, *of_whisper(form, *room)]
    coded = form.precision == "int8"
    memory = hearing_memory(files.arch, *room, coded=coded, kv=form.kv)
    if as_json:
        told = [asdict(decision) for decision in decisions]
        parts = {"available": available, "parts": dict(memory)}
        found = {"model": options.model, "arch": asdict(files.arch), "decisions": told}
        print(json.dumps({**found, "memory": parts}))
        return
    console, arch = Console(highlight=False, markup=False), files.arch
    described = (
        f"whisper, {files.weights[0].name}, encoder of {arch.encoder_layers} layers, decoder of "
        f"{arch.decoder_layers}, width {arch.width}, {arch.heads} heads, vocabulary {arch.vocab}"
    )
    console.print(Text.assemble((options.model, "bold"), "  ", described))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("option", "value", "why"):
        table.add_column(column, justify="left", no_wrap=column == "option")
    for decision in decisions:
        table.add_row(decision.name, decision.value, decision.reason)
    console.print(table)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("memory", "MiB", "share"):
        table.add_column(column, justify="left" if column == "memory" else "right")
    for name, size in [*memory, ("available", available)]:
        table.add_row(name, f"{size / 2**20:,.1f}", f"{size / available:.1%}")
    table.caption = "room of windows and sequences is taken when they are first used"
    console.print(table)
