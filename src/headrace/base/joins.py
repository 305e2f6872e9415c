"""Neighbouring nodes that a backend may fuse: rules over a graph, found by its readers.

Backends choose among the matches of the rules, by the abilities of their kernels for a weight. The
roofline counts the fused nodes. No rule changes a graph.
"""

from __future__ import annotations

from typing import NamedTuple

from .graph import ActivationSpec, Graph, Node, NormSpec, Value, WeightRef

JOINED = frozenset(("around", "add_norm", "norm_codes", "gated_codes", "linear_codes"))
"""Kinds of joined nodes, which no described graph has.

| kind | reads → gives | weights | spec |
|---|---|---|---|
| `around` | x, perhaps r → act(norm(x) · weightᵀ + bias) + r | matrix | `AroundSpec` |
| `add_norm` | residual, x → norm of their sum, the sum | gain | `NormSpec` |
| `norm_codes` | x → codes, scales; residual, x → codes, scales, the sum | gain | `CodesSpec` |
| `gated_codes` | gate next to up → codes, scales | | `CodesSpec` |
| `linear_codes` | codes, scales → [·, out] | matrix, perhaps bias | `LinearSpec` |
"""


class AroundSpec(NamedTuple):
    """A product with the nodes around it: reads x, and the residual if it is added to one."""

    bias: WeightRef | None
    norm: NormSpec | None = None
    gain: WeightRef | None = None
    gate: ActivationSpec | None = None


class CodesSpec(NamedTuple):
    """A norm (of a sum, if it reads two) or a gate that writes codes for `consumer`."""

    of: NormSpec | ActivationSpec
    consumer: WeightRef


def is_sum(node: Node) -> bool:
    """Return whether a node adds two values without a factor."""
    return node.kind == "add" and node.spec is None


def only_reader(graph: Graph, value: Value) -> int:
    """Return the index of the only node that reads a value; -1 if there are several or it is an
    output."""
    readers = graph.readers(value)
    return readers[0] if len(readers) == 1 and value not in graph.outputs.values() else -1


def reader_of_kind(graph: Graph, index: int, kind: str) -> int:
    """Return the index of the only reader of a node's first value, if it has this kind; else -1."""
    reader = only_reader(graph, graph.nodes[index].out[0])
    return reader if reader >= 0 and graph.nodes[reader].kind == kind else -1


def sum_after(graph: Graph, index: int) -> int:
    """Return the index of the sum that product `index` can compute as residual + x · w; else -1.

    Nothing else reads the product, and nothing reads the residual between the two.
    """
    product, reader = graph.nodes[index], reader_of_kind(graph, index, "add")
    if reader < 0 or not is_sum(graph.nodes[reader]):
        return -1
    residual, x = graph.nodes[reader].reads
    between = any(index <= other < reader for other in graph.readers(residual))
    before = x is product.out[0] and graph.maker(residual) < index
    return reader if before and not between else -1


def norm_after(graph: Graph, index: int) -> int:
    """Return the index of the norm right after the sum `index` that reads it; else -1."""
    nodes = graph.nodes
    if index < 0 or not is_sum(nodes[index]) or index + 1 == len(nodes):
        return -1
    after = nodes[index + 1]
    return index + 1 if after.kind == "norm" and after.reads == nodes[index].out else -1


def norm_before(graph: Graph, index: int) -> int:
    """Return the index of the RMS norm whose only reader is product `index`; else -1."""
    source = graph.nodes[index].reads[0]
    if only_reader(graph, source) != index:
        return -1
    before = graph.maker(source)
    return before if is_rms(graph.nodes[before]) else -1


def is_rms(node: Node) -> bool:
    """Return whether a node is an RMS norm."""
    return isinstance(node.spec, NormSpec) and node.kind == "norm" and node.spec.kind == "rms"
