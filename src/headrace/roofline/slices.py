"""Work of a part that is run from node to node, and is no language model: its graph's sums.

Products and attention take the longer of their computing and their memory time, at the shares of
the ceilings that such operators reach. All other nodes read and write their rows once. The floor is
that of `step`: no activation costs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import NamedTuple

from ..base.graph import AttentionSpec, Graph, Node
from .hardware import Hardware
from .machine import this_hardware
from .step import Floor

NUMBER, CODED = 4, 34 / 32
"""Bytes of a number: such parts compute in fp32; of a weight in blocks of eight bits."""
TYPE, CODES = "float32", "int8"


class NodeWork(NamedTuple):
    """The work of one node of a step."""

    label: str
    """Kind of the work; of a product its purpose."""
    kind: str
    """Kind of its curves: product, attention, vector."""
    type: str
    """Type in which it computes, or else in fp32."""
    flops: float
    weight_bytes: float
    moved: float
    """Bytes of rows that are read and written."""

    def seconds(self, hardware: Hardware) -> float:
        """Return its predicted time."""
        type = self.type if self.type in hardware.rates else TYPE
        kind = self.kind
        curve = hardware.efficiency.curve(
            kind, (f"{kind}/{type}", f"{kind}/many", f"{kind}/prefill")
        )
        computing = self.flops / (hardware.rate(type) * curve.compute)
        moved = self.weight_bytes + self.moved
        return curve.floor_seconds + max(computing, moved / (hardware.bandwidth * curve.memory))

    def floor(self, hardware: Hardware) -> Floor:
        """Return its least time on each resource."""
        computing = self.flops / hardware.rate(self.type)
        return Floor(computing, self.weight_bytes / hardware.bandwidth, 0.0)


def slice_seconds(graph: Graph, device: str, *, coded: bool) -> Callable[[int], float] | None:
    """Return the predictor of all slices together, by the units of an input; None if the hardware
    is not known. `coded`: see `Tower.coded`."""
    known = this_hardware(device)
    if known is None:
        return None
    return lambda units: part_seconds(graph, known, units, coded=coded)


def part_seconds(graph: Graph, hardware: Hardware, units: int, *, coded: bool = False) -> float:
    """Return the seconds of all nodes of a graph whose step has `units` rows."""
    return sum(one.seconds(hardware) for one in part_work(graph, units, coded=coded))


def part_work(graph: Graph, units: int, *, coded: bool = False) -> list[NodeWork]:
    """Return the work of the nodes of a graph whose step has `units` rows. A window is a view: the
    product reads it."""
    return [_work(node, units, coded=coded) for node in graph.nodes if node.kind != "window"]


def least_seconds(floors: Iterable[Floor]) -> float:
    """Return the least time of all these: each resource is in use all the time."""
    return max(map(sum, zip(*floors, strict=True)))


def _work(node: Node, units: int, *, coded: bool) -> NodeWork:
    moved: float = NUMBER * sum(
        value.rows.of(units) * value.width for value in (*node.reads, *node.out)
    )
    if node.kind in ("linear", "conv"):
        weight = node.weights[0]
        plain = ".conv" in weight.names[0]
        codes = coded and not plain
        size = prod((weight.out, weight.width))
        return NodeWork(
            "convolutions" if plain else weight.purpose,
            "product",
            CODES if codes else TYPE,
            2.0 * node.out[0].rows.of(units) * size,
            (CODED if codes else NUMBER) * size,
            moved,
        )
    if node.kind == "attend" and isinstance(node.spec, AttentionSpec):
        seen = min(units, node.spec.window or units)
        flops = node.spec.heads * (4 * node.spec.size + 5) * float(units) * seen
        return NodeWork("attention", "attention", CODES if coded else TYPE, flops, 0.0, moved)
    if node.kind == "scatter":
        moved *= 2  # Rows that are read and their places in x, at most all of them.
    return NodeWork(node.kind, "vector", TYPE, 0.0, 0.0, moved)
