"""Command R, R7B and A (Cohere 2024, 2025): attention and feed-forward beside each other."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward


def cohere2(arch: ModelArch) -> Graph:
    """x + attention(norm(x)) + feed_forward(norm(x)); layer norms without a bias, of R7B and A full
    layers without positions."""
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.layer_norm(x, f"{at}.input_layernorm", bias=False)
        x = to.add(x, attention(to, layer, normed, f"{at}.self_attn"))
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.layer_norm(x, "model.norm", bias=False)
    return to.graph(hidden=hidden, logits=head(to, hidden))
