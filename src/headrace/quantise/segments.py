"""A step graph cut into short runs of nodes, one after the other over the whole text.

A run holds the weights of half a layer. Between two runs only the values of every token that a
later run reads are kept, so the cuts lie where those are narrowest: after a sum. No name of a
family is read; a layer's KV never crosses a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..base.absorb import absorbed
from ..base.graph import RECURRENT, Graph, Node, Value, WeightRef

MATRICES = ("linear", "moe", "heads", "logits")
"""Roles of weights that multiply an input."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphSegment:
    """Nodes that run over all tokens before the next segment begins."""

    graph: Graph
    """Its nodes; inputs are the values of earlier segments, outputs those that later ones read."""

    @property
    def products(self) -> list[WeightRef]:
        """The matrices that it multiplies by."""
        return [ref for ref in self.graph.weights() if ref.role in MATRICES]

    @property
    def widest(self) -> int:
        """Numbers per token that are alive at once, at most."""
        return max(_alive(self.graph.nodes, tuple(self.graph.outputs.values())))


def segments(graph: Graph) -> list[GraphSegment]:
    """Cut a described graph. The parts before the first product and after the last join others."""
    graph = absorbed(graph)
    nodes, outputs = graph.nodes, tuple(graph.outputs.values())
    alive, held = _alive(nodes, outputs), _held(nodes)
    found: list[GraphSegment] = []
    first = 0
    for index in range(len(nodes)):
        last = index == len(nodes) - 1
        products = any(
            ref.role in MATRICES for node in nodes[first : index + 1] for ref in node.weights
        )
        later = any(ref.role in MATRICES for node in nodes[index + 1 :] for ref in node.weights)
        if last or (products and later and not held[index] and _narrow(alive, index)):
            found.append(_segment(nodes, first, index + 1, outputs))
            first = index + 1
    return found


def _narrow(alive: Sequence[int], index: int) -> bool:
    """Return whether the plateau that `index` begins is lower than both its neighbours."""
    if index and alive[index - 1] <= alive[index]:
        return False
    after = next((one for one in alive[index + 1 :] if one != alive[index]), None)
    return after is not None and after > alive[index]


def _alive(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[int]:
    """Return, for each node, the width of all values that are read after it."""
    last: dict[Value, int] = {value: len(nodes) for value in outputs}
    made: dict[Value, int] = {}
    for index, node in enumerate(nodes):
        for value in node.reads:
            last[value] = max(index, last.get(value, 0))
            made.setdefault(value, -1)
        for value in node.out:
            made[value] = index
            last.setdefault(value, index)
    change = [0] * (len(nodes) + 2)
    for value, at in made.items():
        change[at + 1] += value.width
        change[last[value] + 1] -= value.width
    found, width = [], change[0]
    for index in range(len(nodes)):
        width += change[index + 1]
        # Values made by this node are counted even if nothing reads them: they exist while it runs.
        found.append(width)
    return found


def _held(nodes: Sequence[Node]) -> list[bool]:
    """Return, for each node, whether a layer's KV is read after it, or a state written before."""
    ends: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node.kind in ("write", "attend", *RECURRENT):
            ends[node.spec.layer] = index  # type: ignore[attr-defined]
    begun: set[int] = set()
    found = []
    for index, node in enumerate(nodes):
        if node.kind in ("write", "attend", *RECURRENT):
            begun.add(node.spec.layer)  # type: ignore[attr-defined]
        begun = {layer for layer in begun if ends[layer] > index}
        found.append(bool(begun))
    return found


def _segment(
    nodes: Sequence[Node], first: int, last: int, outputs: Sequence[Value]
) -> GraphSegment:
    mine, rest = nodes[first:last], nodes[last:]
    made = {value for node in mine for value in node.out}
    wanted = {value for node in rest for value in node.reads} | {*outputs}
    inputs = dict.fromkeys(value for node in mine for value in node.reads if value not in made)
    kept = dict.fromkeys(value for node in mine for value in node.out if value in wanted)
    named = {str(number): value for number, value in enumerate(kept)}
    return GraphSegment(Graph(tuple(mine), named, tuple(inputs)))
