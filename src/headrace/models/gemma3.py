"""Gemma 3 (Gemma team 2025), text: five windowed layers to one full, norms on both sides."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward


def gemma3(arch: ModelArch) -> Graph:
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x))).

    Embeddings are scaled, norms multiply by 1 + weight, the head is tied.
    """
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        mixed = attention(to, layer, normed, f"{at}.self_attn")
        x = to.add(x, to.rms_norm(mixed, f"{at}.post_attention_layernorm"))
        normed = to.rms_norm(x, f"{at}.pre_feedforward_layernorm")
        inner = feed_forward(to, layer, normed, f"{at}.mlp")
        x = to.add(x, to.rms_norm(inner, f"{at}.post_feedforward_layernorm"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
