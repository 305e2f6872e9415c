"""Seconds of a part that is run from node to node, and is no language model: its graph's sums.

Products and attention take the longer of their computing and their memory time, at the shares of
the ceilings that such operators reach. All other nodes read and write their rows once.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from ..base.graph import AttentionSpec, Graph, Node
from .hardware import Hardware
from .machine import this_hardware

NUMBER = 4
"""Bytes of a number: such parts compute in fp32."""
TYPE = "float32"


def slice_seconds(graph: Graph, device: str) -> Callable[[int], float] | None:
    """Return the predictor of all slices together, by the units of an input; None if the hardware
    is not known."""
    known = this_hardware(device)
    return None if known is None else lambda units: part_seconds(graph, known, units)


def part_seconds(graph: Graph, hardware: Hardware, units: int) -> float:
    """Return the seconds of all nodes of a graph whose step has `units` rows."""
    return sum(_seconds(node, hardware, units) for node in graph.nodes)


def _seconds(node: Node, hardware: Hardware, units: int) -> float:
    moved = NUMBER * sum(value.rows.of(units) * value.width for value in (*node.reads, *node.out))
    if node.kind == "window":
        return 0.0  # A view: the product reads it.
    kind, flops = "vector", 0.0
    if node.kind == "linear":
        weight = node.weights[0]
        kind, flops = "product", 2.0 * node.out[0].rows.of(units) * weight.out * weight.width
        moved += NUMBER * prod((weight.out, weight.width))
    elif node.kind == "attend" and isinstance(node.spec, AttentionSpec):
        kind, seen = "attention", min(units, node.spec.window or units)
        flops = node.spec.heads * (4 * node.spec.size + 5) * float(units) * seen
    elif node.kind == "scatter":
        moved *= 2  # Rows that are read and their places in x, at most all of them.
    curve = hardware.efficiency.curve(kind, (f"{kind}/many", f"{kind}/prefill"))
    computing = flops / (hardware.rate(TYPE) * curve.compute)
    return curve.floor_seconds + max(computing, moved / (hardware.bandwidth * curve.memory))
