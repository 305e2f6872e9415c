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

from ..loader import open_model
from ..loader.cache import cached_models
from ..loader.cache import remove as remove_model
from ..loader.catalog import CATALOG
from ..loader.download import fetch_catalog
from .progress import DownloadBars

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

CacheDir = Annotated[
    Path | None, typer.Option("--cache-dir", help="Where models are kept.", show_default=False)
]


@command.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    cache_dir: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the models that Headrace knows by name, and those on this disk."""
    if context.invoked_subcommand is not None:
        return
    found = cached_models(cache_dir)
    if as_json:
        print(json.dumps([asdict(model) | {"path": str(model.path)} for model in found]))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("name", min_width=18, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True, min_width=6)
    table.add_column("on disk", no_wrap=True, min_width=7)
    table.add_column("repacked", justify="right", no_wrap=True, min_width=8)
    table.add_column("licence", overflow="fold")
    for model in found:
        state = "yes" if model.complete else size(model.cached) if model.cached else "–"
        packed = size(model.packed) if model.packed else "–"
        table.add_row(model.name, size(model.size), state, packed, model.licence)
    console = Console(highlight=False)
    console.print(table)
    if any(model.what for model in found):
        console.print()
    for model in found:
        default = "; the default" if model.default else ""
        if model.what:
            console.print(f"{model.what}{default}", soft_wrap=True)


@command.command()
def pull(
    name: Annotated[str, typer.Argument(help="Catalog name or hub id.", show_default=False)],
    cache_dir: CacheDir = None,
) -> None:
    """Download a model, resuming where an earlier download stopped, and verify it."""
    known = CATALOG.get(name)
    with DownloadBars(sys.stderr) as bars:
        if known is not None and known.speech:
            path = fetch_catalog(known, cache_dir=cache_dir, progress=bars)
        else:
            path = open_model(name, cache_dir=cache_dir, progress=bars).path
    print(path)


@command.command()
def remove(
    name: Annotated[
        str,
        typer.Argument(help="Catalog name, hub id, or path of a local file.", show_default=False),
    ],
    cache_dir: CacheDir = None,
) -> None:
    """Delete a downloaded model from the cache; of a local file, its repacked weights."""
    print(f"{size(remove_model(name, cache_dir))} freed")


def size(count: int) -> str:
    """Format bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
