"""Step graphs of nothing but the shape that a backend is asked about."""

from __future__ import annotations

from headrace.base.arch import Encoder, ModelArch, Moe
from headrace.base.graph import Graph
from headrace.models.registry import describe


def decoder(head_size: int = 64) -> Graph:
    """Two layers with heads of so many numbers, one dense and one a mixture."""
    return describe(
        ModelArch(
            family="llama",
            vocab_size=40,
            hidden=32,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=head_size,
            intermediate=48,
            max_context=64,
            norm_eps=1e-5,
            moe=Moe(experts=4, active=2, intermediate=16, dense_layers=1),
        )
    )


def encoder() -> Graph:
    """BERT of two layers."""
    return describe(
        ModelArch(
            family="bert",
            vocab_size=40,
            hidden=64,
            layers=2,
            heads=2,
            kv_heads=2,
            head_dim=32,
            intermediate=96,
            max_context=64,
            norm_eps=1e-5,
            activation="gelu",
            encoder=Encoder(types=2),
        )
    )


def kinds(graph: Graph) -> list[str]:
    """The kinds of its nodes, each once, in their order."""
    return list(dict.fromkeys(node.kind for node in graph.nodes))
