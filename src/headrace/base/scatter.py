"""Rows of other parts in a step: the pass that inserts `scatter`.

A family describes its embedding by ids. Steps in which some tokens stand for another part's output
run the graph that this pass makes; steps of text alone run the graph as it is described.
"""

from __future__ import annotations

from dataclasses import replace

from .graph import EmbedSpec, Graph, Node, Value


def scattered(graph: Graph) -> Graph:
    """Insert `scatter` after the embedding of tokens; all its readers read the result. A graph
    without one, such as a later stage's, is returned as it is."""
    at = next((i for i, node in enumerate(graph.nodes) if _of_tokens(node)), -1)
    if at < 0:
        return graph
    (x,) = graph.nodes[at].out
    y = Value(x.rows, x.width, x.dtype)

    def instead(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(y if value is x else value for value in values)

    nodes = [replace(node, reads=instead(node.reads)) for node in graph.nodes]
    nodes.insert(at + 1, Node("scatter", (x,), (y,)))
    outputs = {name: y if value is x else value for name, value in graph.outputs.items()}
    return Graph(tuple(nodes), outputs, graph.inputs)


def _of_tokens(node: Node) -> bool:
    return isinstance(node.spec, EmbedSpec) and node.spec.index == "tokens"
