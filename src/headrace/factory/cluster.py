"""A fleet on the machines of a Ray cluster, which declare their kind as resources.

A cell for a kind of machine takes one unit of the resource of that name, so a machine that declares
one unit runs one cell at a time. Ray carries commands and the ends of cells; everything else is in
the store, which all machines see under one path. If a task's machine is lost, the task restarts
elsewhere and finds the finished stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Any

from ..base.errors import OptionError
from ..base.extras import needing
from .fleet import TRIES, Cell, Planned, build_cell, plan_cells

with needing("--on ray needs", "ray", param="on"):
    import ray
    from ray.exceptions import RayError

FLIGHT = 256
"""Tasks submitted to Ray at once."""
PATIENCE = 10.0
"""Seconds without a finished task after which a kind of machine must exist in the cluster."""
BROKEN = -1
"""Status of a cell whose task was lost."""


class RayCluster:
    """The cluster that Ray finds: `RAY_ADDRESS`, or one that was started on this machine."""

    def __init__(self, build: Callable[[Cell], tuple[int, str]] = build_cell) -> None:
        """Connect to the cluster. `build`: a task's work on its cell. Raises `OptionError` without
        a cluster."""
        self._build = build
        try:
            ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise OptionError(f"no Ray cluster can be reached: {reason:.200}", param="on") from None

    def plan(self, cells: list[Cell]) -> list[Planned]:
        """Plan each cell on its kind of machine, all of one kind in one task."""
        kinds: dict[str, list[int]] = defaultdict(list)
        for place, cell in enumerate(cells):
            kinds[cell.hardware].append(place)
        found: dict[int, Planned] = {}
        if own := kinds.pop("", None):
            found |= zip(own, plan_cells(cells[at] for at in own), strict=True)
        work = ((kind, kind, _planned, [cells[at] for at in at]) for kind, at in kinds.items())
        for kind, planned in self._run(work):
            for number, at in enumerate(kinds[kind]):
                lost = cells[at].engine.model, "broken", str(planned)
                found[at] = lost if isinstance(planned, str) else planned[number]
        return [found[place] for place in range(len(cells))]

    def build(self, cells: list[Cell]) -> Iterator[tuple[int, int, str]]:
        """Yield (place, exit status, last line printed) of each cell, as they end."""
        work = ((at, cell.hardware, self._build, cell) for at, cell in enumerate(cells))
        for place, ended in self._run(work):
            yield place, *((BROKEN, ended) if isinstance(ended, str) else ended)

    def _run(
        self, work: Iterable[tuple[Any, str, Callable[[Any], Any], Any]]
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (place, the task's result, or the reason of its failure), as tasks end.

        `work`: place, kind of machine, function and its argument.
        """
        running: dict[Any, tuple[Any, str]] = {}
        remote = cache(ray.remote)  # Ray counts each new remote function as a kind of task.
        waiting = iter(work)
        while True:
            for place, kind, function, given in islice(waiting, FLIGHT - len(running)):
                needs = {"num_cpus": 0, "resources": {kind: 1}} if kind else {"num_cpus": 1}
                task = remote(function).options(max_retries=TRIES, **needs)
                running[task.remote(given)] = place, kind
            if not running:
                return
            ended, _ = ray.wait(list(running), timeout=PATIENCE)
            there = ray.cluster_resources() if not ended else {}
            for task in list(running) if not ended else ():
                if (kind := running[task][1]) and kind not in there:
                    ray.cancel(task, force=True)
                    yield running.pop(task)[0], f"no machine of the cluster has {kind!r:.80}"
            for task in ended:
                place, _ = running.pop(task)
                try:
                    yield place, ray.get(task)
                except RayError as error:
                    yield place, str(getattr(error, "cause", error)).strip().splitlines()[0]


def _planned(cells: list[Cell]) -> list[Planned]:
    return list(plan_cells(cells))
