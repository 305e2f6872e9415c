"""An unchanged fleet of stub cells: what it costs to plan it, and to find that nothing is to run.

Run: `python benchmarks/factory_fleet.py [CELLS]`. Real keys, store and graph; the recipes write a
few bytes. Fifteen cells of each model, as five kinds of hardware by three recipes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

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
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 3000), indent=1))
