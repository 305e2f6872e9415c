"""`headrace convert`: a model's numbers in another format, if that loses nothing."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..base.config import DEFAULT_MODEL, EngineOptions
from ..base.errors import OptionError, one_of
from ..base.extras import needing_torch
from ..factory.convert import TARGETS, Converting, ConvertWish
from ..loader.progress import ProgressLine
from .flags import argument, flag

FAILED = 1
"""Exit status if something would be lost."""
SHOWN = 5
"""Most lossy tensors that are named; the report has all."""


def convert(
    model: Annotated[str, argument("A model: as of `headrace serve`.")] = DEFAULT_MODEL,
    to: Annotated[
        str, flag(f"The other kind of file, or a format: {', '.join(TARGETS)}.", "--to")
    ] = "safetensors",
    out: Annotated[Path | None, flag("The result; none: named after both.")] = None,
    lossy: Annotated[bool, flag("Also if numbers change: to the nearest.", "--lossy")] = False,
    dry_run: Annotated[bool, flag("Say what would be lost; make nothing.", "--dry-run")] = False,
    cache_dir: Annotated[str | None, flag("Where models are kept.")] = None,
    offline: Annotated[bool, flag("Download nothing.", "--offline")] = False,
    as_json: Annotated[bool, flag("Print one JSON object.", "--json")] = False,
) -> None:
    """Move a model to another format; publish it only if every number stays the same.

    The result is opened again, and all its numbers are compared with the model's.
    """
    one_of(to, TARGETS, "to", OptionError)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True, markup=False)
    engine = EngineOptions(model=model, cache_dir=cache_dir, offline=offline)
    bars = ProgressLine(sys.stderr, enabled=not as_json)
    with bars, needing_torch(lambda: "this conversion"):
        planned = Converting(ConvertWish(engine, to, out, lossy), bars)
        report = planned.run(dry=dry_run)
    made = report["proof"] is not None
    if made:
        path = planned.out.with_name(f"{planned.out.name}.report.json")
        path.write_text(json.dumps(report, indent=1) + "\n")
    if as_json:
        print(json.dumps(report))
    _say(console, planned.out, report)
    if not made and not report["lossless"]:
        if not dry_run:
            console.print("nothing was published; --lossy allows it", style="bold red")
        raise typer.Exit(FAILED)


def _say(console: Console, out: Path, report: dict[str, Any]) -> None:
    lost = [one for one in report["tensors"] if not one["lossless"]]
    moved, stay = report["moved"], report["stay"]
    console.print(
        f"{out}: {moved - len(lost)} of {moved} tensors move without loss, {stay} stay as they are"
    )
    for one in sorted(lost, key=lambda one: -_size(one["error"]))[:SHOWN]:
        console.print(
            f"{one['tensor']}: {one['was']} to {one['kind']} changes {one['changed']:,} of "
            f"{one['numbers']:,} numbers; squared error {_size(one['error']):.2g} of all",
            style="yellow",
        )
    if len(lost) > SHOWN:
        console.print(f"and {len(lost) - SHOWN} more", style="yellow")
    if proof := report["proof"]:
        same = proof["numbers"] - proof["changed"]
        console.print(
            f"proof: {same:,} of {proof['numbers']:,} numbers of {proof['tensors']} tensors are "
            "the same when loaded"
        )


def _size(error: float | None) -> float:
    return math.inf if error is None else error


command = convert
