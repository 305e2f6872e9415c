"""StarCoder 2 (Lozhkov et al. 2024): layer norms, biases, a feed-forward without a gate."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import ActivationSpec, Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import two_products
from .common import ACTIVATIONS
from .family import Family, Names, flag, number, word
from .windows import WINDOW


def starcoder2(arch: ModelArch) -> Graph:
    """Describe x + attention(norm(x)), then x + project(act(expand(norm(x)))); all products have a
    bias or none has."""
    to = Description(arch)
    activation = ActivationSpec(arch.activation)
    x = embedding(to)
    for layer in range(arch.layers):
        at = f"model.layers.{layer}"
        normed = to.layer_norm(x, f"{at}.input_layernorm")
        x = to.add(x, attention(to, layer, normed, f"{at}.self_attn"))
        normed = to.layer_norm(x, f"{at}.post_attention_layernorm")
        products = f"{at}.mlp.c_fc", f"{at}.mlp.c_proj"
        x = to.add(x, two_products(to, normed, *products, activation, bias=arch.output_bias))
    hidden = to.layer_norm(x, "model.norm")
    return to.graph(hidden=hidden, logits=head(to, hidden))


FAMILIES = (
    Family(
        "starcoder2", starcoder2, {"starcoder2": ("Starcoder2ForCausalLM",)}, "starcoder2",
        defaults={
            "num_key_value_heads": 2, "max_position_embeddings": 4096, "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        fields={
            "norm_eps": number("norm_epsilon", "attention.layer_norm_epsilon", 1e-12, 1e-1),
            "activation": word("hidden_act", "", ACTIVATIONS, "gelu_pytorch_tanh"),
            "qkv_bias": flag("use_bias", "", True, tensors="blk.0.attn_q.bias"),
            "output_bias": flag("use_bias", "", True, tensors="blk.0.attn_output.bias"),
            "_window": WINDOW,
        },
        names=Names({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    ),
)  # fmt: skip
