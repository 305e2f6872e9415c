"""Slices of a part's graph: places at which a run may stop, to go on in another step."""

from __future__ import annotations

from .graph import Graph

_FED = "activate", "gated"


def slices(graph: Graph) -> tuple[int, ...]:
    """Return the first node of each slice, then the number of nodes.

    Each layer has two slices: its attention and its feed-forward. The nodes before the first layer
    are one, and so is each K and V of another part's layer. A run stops only where later nodes read
    one value alone, so that little is kept in addition to finished outputs.
    """
    nodes, narrow = graph.nodes, _narrow(graph)
    own = [index for index, node in enumerate(nodes) if node.kind in ("attend", "write")]
    # Convolutions before the first layer have activations of their own.
    own += [at for at, node in enumerate(nodes) if node.kind in _FED and at > own[0]]
    firsts = {max(at for at in narrow if at <= index) for index in own}
    return (*sorted(firsts | {0}), len(nodes))


def blocks(graph: Graph) -> tuple[int, ...]:
    """Return the same for a graph of residual blocks, each of which is a slice."""
    sums = [at for at in _narrow(graph) if at and graph.nodes[at - 1].kind == "add"]
    return (0, *sums, len(graph.nodes))


def _narrow(graph: Graph) -> list[int]:
    """Return the nodes before which later ones read one value alone."""
    nodes = graph.nodes
    last = {value: max(graph.readers(value), default=-1) for node in nodes for value in node.out}
    last |= {value: len(nodes) for value in graph.outputs.values() if last[value] >= 0}
    kept, narrow = set(graph.inputs), [0]
    for index, node in enumerate(nodes):
        kept.update(node.out)
        kept = {value for value in kept if last.get(value, -1) > index}
        if len(kept) == 1:
            narrow.append(index + 1)
    return narrow
