"""OLMo 2 and 3 (OLMo team 2024, 2025), EXAONE 4 (LG AI Research 2025): norms after the blocks."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward


def olmo2(arch: ModelArch) -> Graph:
    """Describe x + norm(attention(x)), then x + norm(feed_forward(x))."""
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        mixed = attention(to, layer, x, f"{at}.self_attn")
        x = to.add(x, to.rms_norm(mixed, f"{at}.post_attention_layernorm"))
        inner = feed_forward(to, layer, x, f"{at}.mlp")
        x = to.add(x, to.rms_norm(inner, f"{at}.post_feedforward_layernorm"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
