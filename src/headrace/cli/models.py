"""`headrace models`: the catalog, and its models on this disk."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.config import DEFAULT_MODEL
from ..base.hardware import hardware
from ..loader import open_model
from ..loader.cache import CachedModel, cached_models
from ..loader.cache import remove as remove_model
from ..loader.catalog import CATALOG, TASKS
from ..loader.open import fetched
from ..loader.progress import ProgressLine
from ..speech.finding import find, hears
from .flags import argument, flag
from .models_speed import CONTEXT, predicted

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

CacheDir = Annotated[Path | None, flag("Where models are kept.", "--cache-dir", show_default=False)]


@command.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    cache_dir: CacheDir = None,
    speed: Annotated[
        bool, flag("Predict the tokens a second of those on disk, for one user.", "--speed")
    ] = False,
    as_json: Annotated[bool, flag("Print one JSON list.", "--json")] = False,
) -> None:
    """List the models that Headrace knows by name, and those on this disk."""
    if context.invoked_subcommand is not None:
        return
    found = cached_models(cache_dir)
    speeds = predicted([model for model in found if model.complete]) if speed else {}
    if as_json:
        more = [{"path": str(model.path), "speed": speeds.get(model.name)} for model in found]
        print(json.dumps([asdict(model) | each for model, each in zip(found, more, strict=True)]))
        return
    console = Console(highlight=False, markup=False)
    console.print(_table(found, free := hardware().free, speeds if speed else None))
    note = f"tokens/s: predicted, for one user after {CONTEXT:,} tokens, without drafts\n"
    print(
        f"\n{note if speed else ''}"
        f"fits: the estimated memory is below the {size(free)} that are free here\n"
        f"default: {DEFAULT_MODEL}\n"
        "headrace serve NAME downloads and serves; headrace explain NAME plans the memory"
    )


def _table(found: list[CachedModel], free: int, speeds: dict[str, float] | None) -> Table:
    """Make a row per model, grouped by task, the smallest first.

    `speeds`: predicted tokens a second by name, in place of the bytes of repacked weights.
    """
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("name", min_width=20, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True, min_width=6)
    table.add_column("memory", justify="right", no_wrap=True, min_width=6)
    table.add_column("here", no_wrap=True, min_width=7)
    last = "repacked" if speeds is None else "tokens/s"
    table.add_column(last, justify="right", no_wrap=True, min_width=8)
    table.add_column("licence", overflow="fold")
    for task, title in {**TASKS, "": "Others on this disk"}.items():
        models = [model for model in found if model.task == task]
        if models:
            table.add_row(Text(title, style="bold"))
        for model in models:
            fits = "fits" if model.memory <= free else "–"
            if not task and not model.cached:  # A file elsewhere, whose repacked weights are kept.
                fits = "on disk" if Path(model.name).exists() else "gone"
            state = "on disk" if model.complete else size(model.cached) if model.cached else fits
            memory = size(model.memory) if model.memory else "–"
            if speeds is None:
                cell = size(model.packed) if model.packed else "–"
            else:
                cell = f"{speeds[model.name]:.3g}" if model.name in speeds else "–"
            whole = size(model.size) if model.size else "–"
            table.add_row(model.name, whole, memory, state, cell, model.licence)
    return table


@command.command()
def pull(
    name: Annotated[str, argument("Catalog name or hub id.", show_default=False)],
    cache_dir: CacheDir = None,
) -> None:
    """Download a model, resuming where an earlier download stopped, and verify it."""
    with ProgressLine(sys.stderr) as bars:
        if hears(name, cache_dir=cache_dir, offline=False):
            path = find(name, cache_dir=cache_dir, progress=bars)
        elif name in CATALOG and CATALOG[name].task == "program":
            path = fetched(name, cache_dir=cache_dir, progress=bars)
        else:
            path = open_model(name, cache_dir=cache_dir, progress=bars).path
    print(path)


@command.command()
def remove(
    name: Annotated[
        str, argument("Catalog name, hub id, or path of a local file.", show_default=False)
    ],
    cache_dir: CacheDir = None,
) -> None:
    """Delete a downloaded model from the cache; of a local file, its repacked weights."""
    print(f"{size(remove_model(name, cache_dir))} freed")


def size(count: int) -> str:
    """Format bytes for human readers."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
