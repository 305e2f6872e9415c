"""An unchanged fleet of stub cells: what it costs to plan it, and to find that nothing is to run.

Run: `python benchmarks/factory_fleet.py [CELLS [MODEL]]`. Real keys, store and graph; the recipes
write a few bytes. Fifteen cells of each model, as five kinds of hardware by three recipes.

With MODEL, a folder with a small model: cells of the stages that a build has, of copies of it that
differ in one file, by fifteen recipes; what would start an engine gives fixed figures instead.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headrace.base.config import EngineOptions
from headrace.factory import build
from headrace.factory.fleet import Cell, run_fleet
from headrace.factory.graph import Graph
from headrace.factory.key import canonical
from headrace.factory.stage import Recipe, Result, Stage, Work
from headrace.factory.store import Store


def write(work: Work) -> Result:
    """A few bytes that depend on all that the stage was given."""
    inputs = {name: one.content for name, one in work.inputs.items()}
    text = canonical({"of": inputs, **work.stage.parameters})
    return Result({"text": work.store.put(text, "text/plain")})


def fleet(cells: int) -> list[Stage]:
    """A stage for each model, one for each cell."""
    stages = []
    for model in range(cells // 15):
        stages.append(Stage(f"m{model}/fetch", "write", (), {"model": model}))
        for cell in range(15):
            name = f"m{model}/c{cell}"
            stages.append(Stage(name, "write", (f"m{model}/fetch",), {"cell": cell}))
    return stages


ENGINE = {
    "limits": {
        "max_context": 512,
        "max_sequences": 4,
        "task": "tokens",
        "format": "",
        "identity": {},
    },
    "accuracy": {"perplexity": {"value": 9.5, "tokens": 300}, "share": 0.99},
    "performance": {"seconds_per_token": 0.02, "tokens_per_second": 100.0},
}
"""Figures of the stages that start an engine."""


def real(count: int, model: Path) -> dict[str, float | int]:
    """Plan the cells of a fleet as `headrace factory fleet` does, once all of them were built."""

    def stub(name: str) -> Recipe:
        return replace(build.RECIPES[name], run=lambda _work: Result(figures=ENGINE[name]))

    build.RECIPES.update({name: stub(name) for name in ENGINE})

    def nobody(cells: list[Cell]) -> Iterator[tuple[int, int, str]]:
        assert not cells
        return iter(())

    with tempfile.TemporaryDirectory() as name:
        root, cells = Path(name), []
        for number in range(count // 15):
            shutil.copytree(model, folder := root / str(number))
            (folder / "NUMBER").write_text(str(number))
            for recipe in range(15):
                words = {"model": str(folder), "cache_dir": name, "max_sequences": recipe + 1}
                cells.append(Cell(EngineOptions(**words), build.BuildOptions()))
        shared = build.Shared()
        for cell in cells:
            build.Build(cell.engine, cell.wanted, shared=shared).run()
        begin, cpu = time.perf_counter(), time.process_time()
        kept = [one.end for one in run_fleet(cells, nobody)].count("kept")
        return {
            "real_cells": kept,
            "real_planned_s": round(time.perf_counter() - begin, 2),
            "real_planned_cpu_s": round(time.process_time() - cpu, 2),
        }


def main(cells: int) -> dict[str, float | int]:
    """Seconds and CPU seconds of each of: the first run, a plan, a run with nothing to do."""
    recipes = {"write": Recipe(write)}
    found: dict[str, float | int] = {"cells": cells}
    with tempfile.TemporaryDirectory() as folder:
        store, stages = Store(Path(folder)), fleet(cells)
        changed = [
            replace(one, parameters={"cell": -1}) if one.name == "m7/c3" else one for one in stages
        ]
        for name, act in (
            ("first", lambda: Graph(stages, recipes).run(store)),
            ("planned", lambda: Graph(stages, recipes).plan(store)),
            ("unchanged", lambda: Graph(stages, recipes).run(store)),
            ("one_leaf", lambda: Graph(changed, recipes).run(store)),
        ):
            begin, cpu = time.perf_counter(), time.process_time()
            steps = act()
            found[f"{name}_s"] = round(time.perf_counter() - begin, 2)
            found[f"{name}_cpu_s"] = round(time.process_time() - cpu, 2)
            found[f"{name}_ran"] = sum(step.ran for step in steps)
    return found


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    told = main(count)
    if len(sys.argv) > 2:
        told |= real(count, Path(sys.argv[2]))
    print(json.dumps(told, indent=1))
