"""Latent attention as plain attention: the pass that packs queries in the form of latents.

A key of latent attention is W_k · latent next to a rotated part, a value is W_v · latent. So q ·
W_k · latent is (W_kᵀ · q) · latent. The weighted sum of values is W_v · (weighted sum of latents)
(DeepSeek-V2, section 2.1.2). All heads attend to one key, which is its own value, and nothing is
unpacked per token of the context. The cheaper form depends on the number of queries in a step. This
one is always used if bits may not depend on how a prompt was cut.
"""

from __future__ import annotations

from .graph import TOKENS, Graph, LatentSpec, Node, Value
from .verify import verify


def absorbed(graph: Graph) -> Graph:
    """Rewrite `graph`, described for all rows, without nodes `write` and `attend` of a latent. Each
    pair becomes `absorb`, `write` and `attend` of one shared key, `unpack`. Weights keep their
    names."""
    latent = [
        isinstance(node.spec, LatentSpec) and node.kind in ("write", "attend")
        for node in graph.nodes
    ]
    if not any(latent):
        return graph
    nodes: list[Node] = []
    for node, of_latent in zip(graph.nodes, latent, strict=True):
        nodes += _rewritten(graph, node) if of_latent else [node]
    made = Graph(tuple(nodes), graph.outputs, graph.inputs)
    verify(made)
    return made


def _rewritten(graph: Graph, node: Node) -> list[Node]:
    spec = node.spec
    assert isinstance(spec, LatentSpec)
    if node.kind == "write":
        return []  # Rewritten with the `attend` that reads it, which has the weights.
    write = graph.nodes[graph.maker(node.reads[0])]
    shared = spec.absorbed
    packing, unpacking = node.weights
    packed = Value(TOKENS, shared.stacked)
    q, mixed = Value(TOKENS, shared.queries), Value(TOKENS, shared.queries)
    return [
        Node("absorb", write.reads, (packed,), (packing,), spec),
        Node("write", (packed,), (q,), (), shared),
        Node("attend", (q,), (mixed,), (), shared),
        Node("unpack", (mixed,), node.out, (unpacking,), spec),
    ]
