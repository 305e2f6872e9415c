"""`headrace simulate A --beside B`: several models in one server on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from ..base.config import EngineOptions
from ..base.errors import OptionError
from ..base.modelfiles import ModelFiles
from ..base.several import WORD, ModelChoice
from ..engine.simulator.sim_models import Course, Load, ModelsAtOnce
from ..loader.progress import ProgressLine
from .explain import open_choice

SECONDS = 60.0
"""Virtual seconds of each run."""
SENTENCES, SENTENCE = 8, 17
"""Inputs of a request for vectors, and tokens of each."""
FIRST, SPOKEN = 4, 30
"""Tokens before a transcription and in it."""


class Played(NamedTuple):
    """A model and its load."""

    name: str
    options: EngineOptions
    files: ModelFiles
    load: Load
    share: float
    """Share of the time of a request alone in which requests begin; 1: without a pause."""


def play(models: Sequence[str], input: int, output: int) -> list[dict[str, Any]]:
    """Simulate each model alone and all together; return their figures. `models`: of
    `--beside`, with `input` and `output` for texts that name none. Raises `HeadraceError`."""
    played = [_read(text, place, input, output) for place, text in enumerate(models)]
    alone, found = [], []
    for one in played:
        with closing(ModelsAtOnce([(one.options, one.files)])) as server:
            alone.append(server.run([replace(one.load, model=0)], SECONDS)[0])
    every = [
        0.0 if one.share == 1 else median(course.requests) / one.share
        for one, course in zip(played, alone, strict=True)
    ]
    loads = [replace(one.load, every=each) for one, each in zip(played, every, strict=True)]
    with closing(ModelsAtOnce([(one.options, one.files) for one in played])) as server:
        together = server.run(loads, SECONDS)
    for one, before, after in zip(played, alone, together, strict=True):
        streams = bool(one.load.tokens and not one.load.units)
        figures = {"alone": _figures(before, streams), "together": _figures(after, streams)}
        found.append({"model": one.name, **figures})
    return found


def show(found: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print the figures of `play`."""
    if as_json:
        print(json.dumps({"models": found}))
        return
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("ms between tokens, or of a request")
    for column in ("alone\np50", "p99", "together\np50", "p99", "p99\nratio"):
        table.add_column(column, justify="right")
    for one in found:
        before, after = one["alone"], one["together"]
        cells = [f"{each[p]:,.1f}" for each in (before, after) for p in ("p50", "p99")]
        table.add_row(one["model"], *cells, f"×{after['p99'] / before['p99']:.2f}")
    Console(highlight=False, markup=False).print(table)


def _figures(course: Course, streams: bool) -> dict[str, float]:
    """Return the quantiles of the gaps of a load that `streams`, or of its requests, in ms, and the
    median of its requests' seconds."""
    ordered = sorted(course.gaps if streams else course.requests)
    at = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
    found = {
        name: round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
        for name, share in at.items()
    }
    return {"count": len(ordered), **found, "request": round(median(course.requests), 3)}


def _read(text: str, place: int, input: int, output: int) -> Played:
    """Open a model of `--beside`. Raises `HeadraceError`."""
    found = WORD.fullmatch(text)
    name, given = (text, "") if found is None else (found["model"], found["own"])
    asked = {"input": 0.0, "output": 0.0, "at_once": 0.0, "share": 1.0}
    for part in given.split(",") if given else []:
        key, _, number = part.partition("=")
        try:
            asked[key] = float(number) if key in asked else asked[key]
            allowed = asked[key] > 0 if key == "share" else 1 <= asked[key] < 1e6
        except (KeyError, ValueError):
            allowed = False
        if not allowed or asked["share"] > 1:
            raise OptionError(
                f"beside: {part!r:.60} is none of input=N, output=N, at_once=N, and share=0.25 of "
                "the time (up to 1)",
                param="beside",
            )
    choice = ModelChoice(EngineOptions(model=name, max_sequences=8, offline=True), ())
    options, files, _ = open_choice(choice, ProgressLine(enabled=sys.stderr.isatty()), shared=True)
    arch = files.arch
    usual, rows = (input, output, 1), 0
    if arch.cross is not None:
        usual, rows = (FIRST, SPOKEN, 1), arch.cross.rows
    elif arch.task != "tokens":
        usual = SENTENCE, 0, SENTENCES
    prompt, made, at_once = (int(asked[k]) or u for k, u in zip(asked, usual, strict=False))
    return Played(name, options, files, Load(place, prompt, made, at_once, rows), asked["share"])
