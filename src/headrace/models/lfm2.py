"""LFM2 (Liquid AI 2025): short convolutions, and attention in every few layers."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward
from ..layers.states import short_convolution


def lfm2(arch: ModelArch) -> Graph:
    """x + convolution or attention(norm(x)), then x + feed_forward(norm(x))."""
    assert arch.recurrence is not None, "the architecture says nothing of convolutions"
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        if layer in arch.recurrence.layers:
            mixed = short_convolution(to, layer, normed, f"{at}.conv")
        else:
            mixed = attention(to, layer, normed, f"{at}.self_attn")
        x = to.add(x, mixed)
        normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
