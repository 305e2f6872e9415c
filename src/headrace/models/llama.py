"""Llama (Touvron et al. 2023): the pre-norm decoder that most families share.

They differ by numbers in `ModelArch`: biases on q, k and v (Qwen2), norms on the heads of q and k
(Qwen3), sliding windows (Mistral), a mixture of experts (Mixtral, Qwen3 MoE), attention over
latents (DeepSeek V2 and V3); and in most layers, in place of attention, short convolutions (LFM2),
Mamba 2 (Granite 4) or the gated delta rule (Qwen3-Next, Qwen3.5).
"""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward
from ..layers.mixing import mixing


def llama(arch: ModelArch) -> Graph:
    """Describe x + mixing(norm(x)), then x + feed_forward(norm(x))."""
    to = Description(arch)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        x = to.add(x, mixing(to, layer, normed, at))
        normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
        x = to.add(x, feed_forward(to, layer, normed, f"{at}.mlp"))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))
