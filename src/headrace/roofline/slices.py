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

NUMBER, CODED = 4, 34 / 32
"""Bytes of a number: such parts compute in fp32; of a weight in blocks of eight bits."""
TYPE, CODES = "float32", "int8"


def slice_seconds(graph: Graph, device: str, *, coded: bool) -> Callable[[int], float] | None:
    """Return the predictor of all slices together, by the units of an input; None if the hardware
    is not known. `coded`: see `Tower.coded`."""
    known = this_hardware(device)
    if known is None:
        return None
    return lambda units: part_seconds(graph, known, units, coded=coded)


def part_seconds(graph: Graph, hardware: Hardware, units: int, *, coded: bool = False) -> float:
    """Return the seconds of all nodes of a graph whose step has `units` rows."""
    return sum(_seconds(node, hardware, units, coded=coded) for node in graph.nodes)


def _seconds(node: Node, hardware: Hardware, units: int, *, coded: bool) -> float:
    moved: float = NUMBER * sum(
        value.rows.of(units) * value.width for value in (*node.reads, *node.out)
    )
    if node.kind == "window":
        return 0.0  # A view: the product reads it.
    kind, flops, type = "vector", 0.0, TYPE
    if node.kind == "linear":
        weight = node.weights[0]
        kind, flops = "product", 2.0 * node.out[0].rows.of(units) * weight.out * weight.width
        codes = coded and ".conv" not in weight.names[0]
        type = CODES if codes and CODES in hardware.rates else TYPE
        moved += (CODED if codes else NUMBER) * prod((weight.out, weight.width))
    elif node.kind == "attend" and isinstance(node.spec, AttentionSpec):
        kind, seen = "attention", min(units, node.spec.window or units)
        type = CODES if coded and CODES in hardware.rates else TYPE
        flops = node.spec.heads * (4 * node.spec.size + 5) * float(units) * seen
    elif node.kind == "scatter":
        moved *= 2  # Rows that are read and their places in x, at most all of them.
    curve = hardware.efficiency.curve(kind, (f"{kind}/{type}", f"{kind}/many", f"{kind}/prefill"))
    computing = flops / (hardware.rate(type) * curve.compute)
    return curve.floor_seconds + max(computing, moved / (hardware.bandwidth * curve.memory))
