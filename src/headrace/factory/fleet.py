"""Many cells (models × recipes × kinds of machines) from one file, planned, and built by processes.

Planning finds unchanged cells, which start no process. A cell is built by `headrace factory build`.
The store makes cells that share a stage run it once, wherever they are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from ..base.config import EngineOptions, read_toml
from ..base.errors import HeadraceError, OptionError
from .build import Build, BuildOptions, Shared
from .stage import Outcome

TRIES = 3
"""Starts of a cell whose process is killed; a cell that fails is not tried again."""
KIND = re.compile(r"([a-z0-9](?!emory$)[a-z0-9._-]{0,62})?")
"""A kind of machine; Ray counts `memory` itself."""
BUILD = ("quantise_to", "least_share", "at_least")
"""Build options that a recipe may set; the others apply to the whole fleet."""
FIELDS = "models", "recipes", "hardware", "build"


@dataclass(frozen=True, slots=True)
class Cell:
    """A model with options."""

    engine: EngineOptions
    wanted: BuildOptions
    hardware: str = ""
    """Kind of machine for it, as declared by a cluster's machines; "": any."""

    def words(self, *first: str) -> list[str]:
        """Return the command that builds it, after `python -m headrace`; `first`: its first
        options."""
        words = ["factory", "build", *first]
        for record in (self.engine, self.wanted):
            given, default = asdict(record), asdict(type(record)())
            for name, value in given.items():
                if name == "model" or value == default[name]:
                    continue
                flag = name.replace("_", "-")
                no = "no-" if value is False else ""
                words.append(f"--{no}{flag}" + ("" if isinstance(value, bool) else f"={value}"))
        return [*words, "--", self.engine.model]  # A name may begin with a hyphen.


@dataclass(frozen=True, slots=True)
class CellEnd:
    """The end of a cell: kept, built, failed (a gate), or broken (with the reason)."""

    cell: Cell
    name: str
    end: str
    why: str = ""


Executor = Callable[[list[Cell]], Iterator[tuple[int, int, str]]]
"""(place, exit status, last line printed) of each cell, as they end."""
Planned = tuple[str, str, str]
"""A cell's name, its state ("" if stages are to run), and the reason."""


def read_fleet(path: Path, store: str | None = None) -> list[Cell]:
    """Read the cells of a file: every model by every recipe on every kind of machine.

    Raises `OptionError` with the reason.
    """
    found = read_toml(path, f"{path}", "fleet")
    if unknown := sorted(set(found) - set(FIELDS)):
        raise OptionError(f"{path}: {unknown[0]} is none of {', '.join(FIELDS)}", param="fleet")
    models, recipes = found.get("models", []), found.get("recipes", [{}])
    if not isinstance(models, list) or not models or not isinstance(recipes, list):
        raise OptionError(f"{path}: models and recipes are lists, models not empty", param="fleet")
    if not all(isinstance(one, dict) for one in (*recipes, found.get("build", {}))):
        raise OptionError(f"{path}: recipes and build are tables of options", param="fleet")
    kinds = found.get("hardware", [""])
    if not isinstance(kinds, list) or not all(KIND.fullmatch(str(one)) for one in kinds or [" "]):
        raise OptionError(
            f"{path}: hardware is a list of names as in avx512, not empty", param="fleet"
        )
    cells = []
    for model in models:
        for recipe in recipes:
            try:
                how = {name: value for name, value in recipe.items() if name in BUILD}
                rest = {name: value for name, value in recipe.items() if name not in BUILD}
                engine = EngineOptions(**{"model": model, **rest})
                wanted = BuildOptions(**{**found.get("build", {}), **how, "store": store})
            except TypeError as error:
                raise OptionError(f"{path}: {error}", param="fleet") from None
            engine.verify()
            wanted.verify()
            cells += [Cell(engine, wanted, kind) for kind in kinds]
    return cells


def plan_cells(cells: Iterable[Cell]) -> Iterator[Planned]:
    """Plan each cell on this machine; an error in one does not stop the others."""
    shared = Shared()
    for cell in cells:
        try:
            build = Build(cell.engine, cell.wanted, shared=shared)
            steps = build.plan()
        except HeadraceError as error:
            yield cell.engine.model, "broken", error.message
            continue
        ended = [(step.stage.name, step.result) for step in steps if step.result]
        failed = [name for name, result in ended if result.outcome is Outcome.FAILED]
        whole = "kept" if len(ended) == len(steps) else ""
        yield build.cell, "failed" if failed else whole, ", ".join(failed)


def run_fleet(
    cells: list[Cell],
    execute: Executor,
    plan: Callable[[list[Cell]], Iterable[Planned]] = plan_cells,
) -> Iterator[CellEnd]:
    """Plan all cells, build those with stages to run; yield each cell's end, kept ones first."""
    waiting: list[tuple[Cell, str]] = []
    for cell, (name, end, why) in zip(cells, plan(cells), strict=True):
        if end:
            yield CellEnd(cell, name, end, why)
        else:
            waiting.append((cell, name))
    for place, status, said in execute([cell for cell, _ in waiting]):
        end = {0: "built", 1: "failed"}.get(status, "broken")
        yield CellEnd(*waiting[place], end, "" if end == "built" else said)


def locally(workers: int) -> Executor:
    """Return an executor that runs up to `workers` processes of this machine at once."""

    def execute(cells: list[Cell]) -> Iterator[tuple[int, int, str]]:
        with ThreadPoolExecutor(workers) as pool:
            running = {pool.submit(build_cell, one): at for at, one in enumerate(cells)}
            for one in as_completed(running):
                yield running[one], *one.result()

    return execute


def build_cell(cell: Cell) -> tuple[int, str]:
    """Run the command that builds a cell; return (exit status, last line printed)."""
    return run_command(cell.words("--json"))


def run_command(words: list[str]) -> tuple[int, str]:
    """Run a command, restarted if it is killed; return (exit status, last line printed)."""
    command = [sys.executable, "-m", "headrace", *words]
    for _ in range(TRIES):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode >= 0:
            break
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return done.returncode, said[-1] if said else ""
