"""A fleet on a Ray cluster of this machine: kinds of machines, an absent one, a lost one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config import EngineOptions
from headrace.factory.build import BuildOptions
from headrace.factory.fleet import Cell, run_fleet

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray", reason="NOT TESTED: pip install ray")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head that runs nothing, one machine of kind `big` and two of kind `small`."""
    from ray.cluster_utils import Cluster

    least = {"object_store_memory": 100 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **least})
    made.machines = {
        name: made.add_node(num_cpus=1, resources={kind: 1}, object_store_memory=100 << 20)
        for name, kind in (("big", "big"), ("one", "small"), ("two", "small"))
    }
    made.wait_for_nodes(timeout=120)
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    del os.environ["RAY_ADDRESS"]
    ray.shutdown()
    made.shutdown()


def cells(count: int, kind: str, folder: Path) -> list[Cell]:
    wanted = BuildOptions(store=str(folder))
    return [Cell(EngineOptions(model=f"m{number}"), wanted, kind) for number in range(count)]


def builder() -> Callable[[Cell], tuple[int, str]]:
    """A function that travels by value: workers cannot import this file."""

    def build(cell: Cell) -> tuple[int, str]:
        """Write which machine this is; end once two of them have come so far."""
        node, folder = ray.get_runtime_context().get_node_id(), Path(str(cell.wanted.store))
        with open(folder / cell.engine.model, "a") as file:
            file.write(f"{node}\n")
        while len({line for path in folder.iterdir() for line in path.open()}) < 2:
            time.sleep(0.05)
        if cell.engine.model == "m3":
            return 1, "accuracy"
        if cell.engine.model == "m5":
            raise ValueError("five")
        return 0, ""

    return build


def test_cells_go_to_machines_of_their_kind_and_outlive_one(cluster: Any, tmp_path: Path) -> None:
    from headrace.factory.cluster import RayCluster

    on = RayCluster(builder())
    asked = [*cells(24, "small", tmp_path), *cells(1, "huge", tmp_path)]
    planned = [("cell", "", "") for _ in asked]
    ends = []
    for end in run_fleet(asked, on.build, lambda _cells: planned):
        ends.append(end)
        # Both have begun then; where starting takes long, the kind that nobody has ends first.
        if end.end == "built" and (two := cluster.machines.pop("two", None)):
            cluster.remove_node(two, allow_graceful=False)
    found = {(end.cell.hardware, end.cell.engine.model): (end.end, end.why) for end in ends}
    assert len(found) == len(asked)
    assert found.pop(("small", "m3")) == ("failed", "accuracy")
    assert found.pop(("small", "m5")) == ("broken", "five")
    assert found.pop(("huge", "m0")) == ("broken", "no machine of the cluster has 'huge'")
    assert set(found.values()) == {("built", "")}
    written = [line for path in tmp_path.iterdir() for line in path.open()]
    assert len(set(written)) == 2


def test_planning_is_done_by_a_machine_of_the_kind(cluster: Any, tmp_path: Path) -> None:
    from headrace.factory.cluster import RayCluster

    on = RayCluster(builder())
    none = [
        Cell(EngineOptions(model=str(tmp_path / "none"), offline=True), one.wanted, one.hardware)
        for kind in ("big", "huge", "")
        for one in cells(1, kind, tmp_path)
    ]
    big, huge, here = on.plan(none)
    assert big == here
    assert "none" in big[2]
    assert huge[1:] == ("broken", "no machine of the cluster has 'huge'")
