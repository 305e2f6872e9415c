"""Gemma, Gemma 2 and 3 (Gemma team 2024, 2025); from Gemma 2 with norms on both sides of each
block."""

from __future__ import annotations

from collections.abc import Callable

from ..base.arch import ModelArch
from ..base.graph import Graph
from ..layers.attention import attention
from ..layers.description import Description
from ..layers.embedding import embedding, head
from ..layers.feed_forward import feed_forward
from .common import GELU, embedding_scale
from .family import Config, Family, Field, Names, number
from .llama import llama
from .ropes import THETA, full_rope, local_rope
from .windows import WINDOW, every


def gemma(arch: ModelArch) -> Graph:
    """Describe Gemma 2 and 3, text.

    Embeddings are scaled, norms multiply by 1 + weight, the head is tied; windowed layers alternate
    with full ones, one to one or five to one.
    """
    return both_sides(arch, "post_attention", "pre_feedforward", "post_feedforward")


def both_sides(arch: ModelArch, mixed_norm: str, inner_norm: str, last_norm: str) -> Graph:
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


def _attention_scale(largest: int) -> Callable[[Config], float]:
    """Make a reader of the scale of attention. GGUF has none: it is the head's size, but hidden /
    heads in the model of `largest` layers."""

    def read(config: Config) -> float:
        if not config.gguf:
            return float(config.read(_SCALAR) ** -0.5)
        wide = config["layers"] == largest
        return float((config["hidden"] / config["heads"] if wide else config["head_dim"]) ** -0.5)

    return read


def cap(key: str, default: float | None = None) -> Field:
    field = number(key, key, 1e-3, 1e6, default, zero=default is None)
    return field._replace(null=True)


_SCALAR = number("query_pre_attn_scalar", "", 1e-3, 1e6)
_FIELDS = {
    "activation": GELU,
    "embedding_scale": embedding_scale,
    "norm_offset": 1.0,
}
NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
VISION = (
    r"(model\.)?(vision_tower|multi_modal_projector|embed_vision|embed_audio|audio_tower"
    r"|vision_model)\..*"
)
"""Encoders of images and sounds."""
FAMILIES = (
    Family(
        "gemma", llama, {"gemma": ("GemmaForCausalLM",)}, "gemma",
        defaults={
            "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        fields=_FIELDS,
        allowed={"hidden_act": ("gelu", "gelu_pytorch_tanh")},  # The former means the latter.
    ),
    Family(
        "gemma2", gemma, {"gemma2": ("Gemma2ForCausalLM",)}, "gemma2",
        defaults={
            "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096,
            "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
        },
        fields={
            **_FIELDS, "attention_scale": _attention_scale(46),
            "caps.scores": cap("attn_logit_softcapping", 50.0),
            "caps.logits": cap("final_logit_softcapping", 30.0),
            "_window": WINDOW._replace(default=4096), "_slides": every(2),
        },
        names=Names(NAMES),
    ),
    Family(
        "gemma3", gemma,
        {"gemma3": ("Gemma3ForConditionalGeneration",), "gemma3_text": ("Gemma3ForCausalLM",)},
        "gemma3",
        defaults={
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "max_position_embeddings": 131_072, "sliding_window": 4096,
            "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
        },
        fields={
            **_FIELDS, "attention_scale": _attention_scale(62),
            "caps.scores": cap("attn_logit_softcapping")._replace(gguf=""),
            "caps.logits": cap("final_logit_softcapping"), "qk_norm": True, "_window": WINDOW,
            "_slides": every(6), "_theta": THETA._replace(default=1e6),
            "_local_theta": number("rope_local_base_freq", "rope.freq_base_swa", 1.0, 1e12, 1e4),
            "rope": full_rope, "local_rope": local_rope,
        },
        names=Names(NAMES, unread=VISION),
    ),
)  # fmt: skip
