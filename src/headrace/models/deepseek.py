"""DeepSeek V2 and V3 (DeepSeek-AI 2024): latent attention, and a mixture with shared experts.

Backends get it with its latents absorbed: see `base.absorb`.
"""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import latent_attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward


def deepseek(arch: ModelArch) -> Graph:
    """x + latent_attention(norm(x)), then x + feed_forward(norm(x))."""
    assert arch.mla is not None, "the architecture says nothing of a latent"
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        x = to.add(x, latent_attention(to, layer, normed, f"{at}.self_attn", arch.mla))
        normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
