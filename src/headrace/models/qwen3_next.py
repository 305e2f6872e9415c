"""Qwen3-Next and Qwen3.5 (Qwen 2025, 2026): the gated delta rule, and gated attention in every
fourth layer."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward
from ..layers.states import gated_delta_net


def qwen3_next(arch: ModelArch) -> Graph:
    """x + delta rule or attention(norm(x)), then x + feed_forward(norm(x))."""
    assert arch.recurrence is not None, "the architecture says nothing of states"
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        if layer in arch.recurrence.layers:
            mixed = gated_delta_net(to, layer, normed, f"{at}.linear_attn")
        else:
            mixed = attention(to, layer, normed, f"{at}.self_attn")
        x = to.add(x, mixed)
        normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
