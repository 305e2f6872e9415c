"""Llama (Touvron et al. 2023): the pre-norm decoder that most families share.

What differs between them is a number in `ModelArch`: biases on q, k and v (Qwen2), norms on the
heads of q and k (Qwen3), sliding windows (Mistral), a mixture of experts (Mixtral, Qwen3 MoE).
"""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward


def llama(arch: ModelArch) -> Graph:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        x = to.add(x, attention(to, layer, normed, f"{at}.self_attn"))
        normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
