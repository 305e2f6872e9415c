"""Arcee's AFM (Arcee AI 2025): Llama's decoder with a feed-forward without a gate: relu squared."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import ActivationSpec, Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import two_products
from .family import Family, Names, word


def arcee(arch: ModelArch) -> Graph:
    """Describe x + attention(norm(x)), then x + down(relu(up(norm(x)))²)."""
    to = Description(arch)
    activation = ActivationSpec(arch.activation)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.rms_norm(x, f"{at}.input_layernorm")
        x = to.add(x, attention(to, layer, normed, f"{at}.self_attn"))
        normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
        products = f"{at}.mlp.up_proj", f"{at}.mlp.down_proj"
        x = to.add(x, two_products(to, normed, *products, activation, bias=False))
    hidden = to.rms_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))


FAMILIES = (
    Family(
        "arcee", arcee, {"arcee": ("ArceeForCausalLM",)}, "arcee",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        fields={"activation": word("hidden_act", "", {"relu2": "relu2"}, "relu2")},
        names=Names(permuted=True),
    ),
)  # fmt: skip
