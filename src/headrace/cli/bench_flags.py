"""Flags that the commands of `headrace bench` share, and the options made of them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from ..base.errors import InvalidRequest, one_of
from ..bench.options import PRESETS, RunOptions
from .flags import NONE, Named, flag, with_flags

Roofline = Annotated[str | None, flag("Model whose roofline is put beside what is measured.")]
HardwareOf = Annotated[str, flag("What the server runs on: this, H100, H200 …", "--hardware")]
GateFile = Annotated[
    Path | None,
    flag(
        "Reference of `bench accuracy --save`: its answers and tasks are asked again after "
        "each run, at the run's own concurrency; below --at-least the exit code is 3."
    ),
]
AtLeast = Annotated[float, flag("Share of the reference below which exit is 3.", min=0, max=1)]
GateKinds = Annotated[
    str, flag("What decides: of tokens, perplexity, tasks.", "--gate", show_default="all")
]
LAYOUT = "Ranks, stages, attention groups, spread experts: TP2.PP2, DP8.EP8."
SKEW = "How unevenly experts are chosen; 0: evenly; none: as published."
EVERY_GATE = "tokens,perplexity,tasks"
Out = Annotated[Path | None, flag("Folder of the results.", "--out", "-o")]
AsJson = Annotated[bool, flag("Print the result as JSON.", "--json")]
Keep = Annotated[bool, flag("Add to the history.", "--history/--no-history")]


PANELS = {
    "Server": "url model endpoint api_key extra temperature stream ignore_eos devices "
    "price_per_hour metrics_interval metrics_urls",
    "Prompts and answers": "preset workload trace input output picture tokenizer prefix_tokens "
    "groups zipf turns think_seconds seed",
    "Load": "requests duration arrivals concurrency trace_speed warmup max_concurrency ramp grace "
    "processes",
    "Judgement": "slo max_errors stop_saturated timeout stall",
}
"""Groups of a run's flags in the help."""
_PANEL = {name: panel for panel, names in PANELS.items() for name in names.split()}
_SAID: dict[str, Any] = {"seed": int | None, "metrics_urls": list[str] | None, "extra": str | None}
"""Type of a flag that differs from its field's: None for values that `make_options` fills in."""


def with_run_flags(
    *without: str, only: str | None = None, helps: Named = NONE, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of a run, except those in `without`, or only those in `only`.

    `only`: names separated by spaces. The command gets the flags as `options`, a `RunOptions` (with
    `UNSAID` for a missing seed). `defaults` and `helps`: of fields with another default or meaning
    in this command.
    """
    every = [spec.name for spec in fields(RunOptions)] if only is None else only.split()
    kept = [name for name in every if name not in without]
    more = {"helps": helps, "panels": _PANEL, "types": _SAID}
    return with_flags(RunOptions, "options", make_options, kept, **more, **defaults)


def make_options(given: dict[str, Any]) -> RunOptions:
    """Make `RunOptions` of flags, with `UNSAID` for a seed that was not given (`fresh_seed`)."""
    given = dict(given)
    preset = given.pop("preset", None)
    if preset is not None:
        one_of(preset, PRESETS, "preset")
        given["input"], given["output"] = PRESETS[preset]
        given["preset"] = preset
    if "extra" in given:
        given["extra"] = _object(given["extra"])
    given["metrics_urls"] = given.get("metrics_urls") or []
    if given.get("seed") is None:
        given["seed"] = UNSAID
    return RunOptions(**given)


def default_folder(kind: str) -> Path:
    """Return the default folder of results."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("bench-results") / f"{kind}-{stamp}-{time.monotonic_ns() % 1000:03d}"


UNSAID = -1
"""Seed of options whose command has not drawn one yet."""


def fresh_seed(wish: int) -> int:
    """Draw a seed by default: prompts of an earlier run could be in the server's prefix cache."""
    return secrets.randbelow(10**6) if wish == UNSAID else wish


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"extra is not JSON: {error}", param="extra") from None
    if not isinstance(value, dict):
        raise InvalidRequest("extra must be a JSON object", param="extra")
    return value
