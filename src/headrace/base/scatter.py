"""Rows of other parts in a step: the pass that inserts `scatter`.

A family describes its embedding by ids. Steps in which some tokens stand for another part's output
run the graph that this pass makes; steps of text alone run the graph as it is described. Rows that
are wider than the model have more for each of the first layers, added to what the layer leaves
(DeepStack, Meng et al. 2024).
"""

from __future__ import annotations

from dataclasses import replace

from .graph import EmbedSpec, Graph, Node, ScatterSpec, Value


def scattered(graph: Graph, deep: int = 0) -> Graph:
    """Insert `scatter` after the embedding of tokens, and after each of the first `deep` layers;
    all readers read the result. A graph without an embedding, such as a later stage's, is returned
    unchanged."""
    table = next((node for node in graph.nodes if _of_tokens(node)), None)
    if table is None:
        return graph
    (x,) = table.out
    graph = _after(graph, x, ScatterSpec())
    for layer in range(deep):
        spec = ScatterSpec((layer + 1) * x.width, adds=True)
        graph = _after(graph, _left_by(graph, layer), spec)
    return graph


def _after(graph: Graph, x: Value, spec: ScatterSpec) -> Graph:
    """Insert a node after the one that makes x; all readers of x read its result."""
    y = Value(x.rows, x.width, x.dtype)

    def instead(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(y if value is x else value for value in values)

    nodes = [replace(node, reads=instead(node.reads)) for node in graph.nodes]
    nodes.insert(graph.maker(x) + 1, Node("scatter", (x,), (y,), (), spec))
    outputs = {name: y if value is x else value for name, value in graph.outputs.items()}
    return Graph(tuple(nodes), outputs, graph.inputs)


def _left_by(graph: Graph, layer: int) -> Value:
    """Return the rows that a layer leaves: the norm after it reads them."""
    names = f"model.layers.{layer + 1}.input_layernorm.weight", "model.norm.weight"
    norms = {node.weights[0].names[0]: node for node in graph.nodes if node.kind == "norm"}
    return next(norms[name] for name in names if name in norms).reads[0]


def _of_tokens(node: Node) -> bool:
    return isinstance(node.spec, EmbedSpec) and node.spec.index == "tokens"
