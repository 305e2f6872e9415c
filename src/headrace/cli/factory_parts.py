"""Shared parts of the factory's commands: options, choice of the store, printing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..base.errors import NotFound
from ..factory.stage import Outcome
from ..factory.store import Store, store_folder
from .flags import flag

if TYPE_CHECKING:
    from ..factory.graph import Step

COLOURS = {Outcome.PASSED: "green", Outcome.FAILED: "bold red", Outcome.NOT_EVALUATED: "yellow"}


AsJson = Annotated[bool, flag("Print one JSON object.", "--json")]
At = Annotated[str | None, flag("Folder of results; none: in the cache folder.", "--store")]
Trusted = Annotated[
    Path | None, flag("Public key (PEM) to believe; none: all in factory/trusted.", "--key")
]
Signing = Annotated[Path | None, flag("Ed25519 key (PEM); none: the own.", "--key")]


def existing(named: str | None) -> Store:
    """Open the named store without creating it; raise `NotFound`."""
    folder = store_folder(named)
    if not (folder / "oci-layout").is_file():
        raise NotFound(f"there is no store at {folder}: factory build makes it", param="store")
    return Store(folder)


def show(rows: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in rows[0] if rows else ("there is none",):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console(highlight=False, markup=False).print(table)


def tell(console: Console, what: str, step: Step) -> None:
    name = f"{step.stage.name:12}"
    if what in ("starts", "waits"):
        text = "runs" if what == "starts" else "waits for another process"
        console.print(f"{name} {text}" + (f": {step.why}" if step.why else ""), style="dim")
    elif what == "blocked":
        console.print(f"{name} left out: {step.why}", style="yellow")
    elif step.result is not None:
        kept = " (kept)" if what == "kept" else ""
        reason = f": {step.result.reason}" if step.result.reason else ""
        colour = COLOURS[step.result.outcome]
        console.print(Text.assemble(f"{name} ", (step.result.outcome, colour), kept + reason))
