"""Command R, R7B and A (Cohere 2024, 2025): attention and feed-forward in parallel."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward


def cohere2(arch: ModelArch) -> Graph:
    """Describe x + attention(norm(x)) + feed_forward(norm(x)). Layer norms have no bias; the full
    layers of R7B and A have no positions."""
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.layer_norm(x, f"{at}.input_layernorm", bias=False)
        x = to.add(x, attention(to, layer, normed, f"{at}.self_attn"))
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.layer_norm(x, "model.norm", bias=False)
    return to.graph(hidden=hidden, logits=head(to, hidden))
