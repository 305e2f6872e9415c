"""Granite 4 (IBM 2025): Mamba 2 in most layers, attention without positions in a few."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward
from ..layers.states import state_space


def granite_hybrid(arch: ModelArch) -> Graph:
    """x + state space or attention(norm(x)), then x + feed_forward(norm(x)), both by a factor."""
    assert arch.recurrence is not None, "the architecture says nothing of states"
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        if layer in arch.recurrence.layers:
            mixed = state_space(to, layer, normed, f"{at}.mamba")
        else:
            mixed = attention(to, layer, normed, f"{at}.self_attn")
        x = to.add(x, mixed)
        normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
