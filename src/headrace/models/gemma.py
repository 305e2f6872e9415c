"""Norms on both sides of each block: Gemma 2 and 3 (Gemma team 2024, 2025), GLM-4 of 2025."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward


def gemma(arch: ModelArch) -> Graph:
    """Describe Gemma 2 and 3, text.

    Embeddings are scaled, norms multiply by 1 + weight, the head is tied; windowed layers alternate
    with full ones, one to one or five to one.
    """
    return _both_sides(arch, "post_attention", "pre_feedforward", "post_feedforward")


def glm4(arch: ModelArch) -> Graph:
    """Describe GLM-4: `post_attention_layernorm` is here the norm before the feed-forward."""
    return _both_sides(arch, "post_self_attn", "post_attention", "post_mlp")


def _both_sides(arch: ModelArch, mixed_norm: str, inner_norm: str, last_norm: str) -> Graph:
    """Describe x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x)))."""
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        mixed = attention(to, layer, normed, f"{at}.self_attn")
        x = to.add(x, to.rms_norm(mixed, f"{at}.{mixed_norm}_layernorm"))
        normed = to.rms_norm(x, f"{at}.{inner_norm}_layernorm")
        inner = feed_forward(to, layer, normed, f"{at}.mlp")
        x = to.add(x, to.rms_norm(inner, f"{at}.{last_norm}_layernorm"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
