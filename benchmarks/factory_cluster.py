"""A fleet on a Ray cluster of this machine: stub cells while a machine is killed, then real ones.

Run: `python benchmarks/factory_cluster.py MODEL [CELLS [REAL [SLEEPING]]]`; MODEL: a folder of a
small one; a part with 0 is left out. Each part that has ended replaces what
`results/factory_cluster.json` had of it. Needs `ray`. Three machines of Ray's own test cluster are
processes here: a head that runs no cell and two of kind `small` that run two at once. Stub cells
have the stages, keys, store and graph of a build, and fixed figures where an engine would start;
one of the machines is killed at a third of them. The real ones are built by `headrace factory
build`. Then cells that sleep for a second, on 2 and on 8 places.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from factory_fleet import ENGINE
from ray.cluster_utils import Cluster

from headrace.base.config import EngineOptions
from headrace.factory.build import BuildOptions
from headrace.factory.cluster import RayCluster
from headrace.factory.fleet import Cell, run_fleet

KIND = "small"
STORE = 100 << 20
"""Bytes of each machine's object store: only words travel."""


@contextmanager
def cluster(places: int = 4) -> Iterator[tuple[Cluster, Any]]:
    """The cluster with so many places on two machines, and the one that is to be killed."""
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        one, _two = (
            made.add_node(num_cpus=1, resources={KIND: places // 2}, object_store_memory=STORE)
            for _ in range(2)
        )
        made.wait_for_nodes(timeout=120)
        os.environ["RAY_ADDRESS"] = made.address
        yield made, one
    finally:
        ray.shutdown()
        made.shutdown()


def stub() -> Callable[[Cell], tuple[int, str]]:
    """What builds a cell in its worker with fixed figures; it travels by value."""
    figures = ENGINE

    def build_stub(cell: Cell) -> tuple[int, str]:
        from dataclasses import replace

        from headrace.factory import build
        from headrace.factory.stage import Result

        for name, given in figures.items():
            recipe = build.RECIPES[name]
            build.RECIPES[name] = replace(recipe, run=lambda _work, of=given: Result(figures=of))
        build.Build(cell.engine, cell.wanted).run()
        return 0, ""

    return build_stub


def cells(model: Path, root: Path, count: int, **wanted: Any) -> list[Cell]:
    """Copies of the model that differ in one file, by fifteen recipes."""
    found = []
    for number in range(count):
        folder = root / f"m{number // 15}"
        if not folder.exists():
            shutil.copytree(model, folder)
            (folder / "NUMBER").write_text(str(number))
        words = {"model": str(folder), "cache_dir": str(root), "max_sequences": number % 15 + 1}
        found.append(Cell(EngineOptions(**words), BuildOptions(**wanted), KIND))
    return found


def run(asked: list[Cell], on: RayCluster, at: int = -1, act: Any = None) -> dict[str, Any]:
    """How the cells ended and in which time; `act` is called after the `at`th that was built."""
    begin, ends = time.perf_counter(), Counter[str]()
    for one in run_fleet(asked, on.build, on.plan):
        ends[one.end] += 1
        if one.end == "broken":
            print(one.name, one.why, file=sys.stderr)
        if ends["built"] == at:
            act()
    return {**ends, "s": round(time.perf_counter() - begin, 1)}


def scaling(each: int, seconds: float = 1.0) -> dict[str, Any]:
    """Cells that sleep, `each` to a place, on machines with 2 and 8 places: what Ray adds to them.

    ideal: the time that they sleep, by the time that passed, once all places had one.
    """

    def sleep(_cell: Cell) -> tuple[int, str]:
        time.sleep(seconds)
        return 0, ""

    found: dict[str, Any] = {}
    for places in (2, 8):
        with cluster(places) as _made:
            on, one = RayCluster(sleep), Cell(EngineOptions(), BuildOptions(), KIND)
            assert all(status == 0 for _, status, _ in on.build([one] * places))
            begin = time.perf_counter()
            assert all(status == 0 for _, status, _ in on.build([one] * places * each))
            took = time.perf_counter() - begin
        found[f"{places}_workers"] = {
            "cells": places * each,
            "s": round(took, 2),
            "ideal": round(seconds * each / took, 3),
            "ms_a_cell_more": round((took - seconds * each) / each * 1e3, 1),
        }
    return found


def main(model: Path, count: int = 3000, real: int = 20, each: int = 12) -> None:
    if count or real:
        with tempfile.TemporaryDirectory() as name, cluster() as (made, one):
            asked = cells(model, Path(name), count)
            on = RayCluster(stub())

            def kill() -> None:
                made.remove_node(one, allow_graceful=False)

            if count:
                tell("stub_cells", count)
                tell("stub_with_a_kill", run(asked, on, count // 3, kill))
                tell("stub_unchanged", run(asked, on))
            asked = cells(model, Path(name) / "real", real, at_least=0.001, without="accuracy,sbom")
            if real:
                tell("real_cells", real)
                tell("real", run(asked, RayCluster()))
                tell("real_unchanged", run(asked, RayCluster()))
    if each:
        tell("sleeping", scaling(each))


def tell(part: str, found: Any) -> None:
    """Ray prints among what we print, so the result is a file."""
    place = Path(__file__).parent / "results" / "factory_cluster.json"
    told = {**json.loads(place.read_text()), part: found}
    place.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(one) for one in sys.argv[2:]))
