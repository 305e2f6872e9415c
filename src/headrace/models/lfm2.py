"""LFM2 (Liquid AI 2025): short convolutions in most layers, attention in the others."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import Graph, Value
from ..base.recurrent import ConvSpec
from ..layers.description import Description
from ..layers.states import taps
from .common import NO_WINDOW, UNBIASED, tied
from .family import Config, Family, Names, flag, integer, number
from .llama import hybrid
from .states import without_attention
from .windows import layer_kinds, layer_numbers, no_windows


def lfm2(arch: ModelArch) -> Graph:
    """Describe the pre-norm decoder with convolutions in place of attention in most layers."""
    return hybrid(arch, _convolution, "conv")


def _convolution(to: Description, layer: int, x: Value, at: str) -> Value:
    """Describe LFM2's convolution (Liquid AI 2025): c · conv(b · x) between two products,
    `{at}.{in,out}_proj`."""
    arch = to.arch
    assert arch.recurrence is not None
    bias, width = arch.recurrence.bias, arch.hidden
    spec = ConvSpec(layer, arch.recurrence.taps, gated=True)
    three = to.linear(x, f"{at}.in_proj", outputs=3 * width, bias=bias, purpose="state_in")
    mixed = to.node("short_conv", (three,), width, taps(to, f"{at}.conv", width), spec)
    return to.linear(mixed, f"{at}.out_proj", outputs=width, bias=bias, purpose="state_out")


_INNER = integer(("block_ff_dim", "intermediate_size"), "feed_forward_length", 1, 2**20)
_ADJUSTED = flag("block_auto_adjust_ff_dim", "", True)
_FACTOR = number("block_ffn_dim_multiplier", "", 0.01, 100.0, 1.0)
_MULTIPLE = integer("block_multiple_of", "", 1, 2**16, 256)


def _inner(config: Config) -> int:
    """Read the width of the feed-forward: two thirds of a number, times a factor, rounded up to a
    multiple. GGUF has the result."""
    inner = int(config.read(_INNER))
    if config.gguf or not config.read(_ADJUSTED):
        return inner
    multiple = int(config.read(_MULTIPLE))
    return -(-int(config.read(_FACTOR) * int(2 * inner / 3)) // multiple) * multiple


def _layers(config: Config) -> tuple[int, ...]:
    """Return the layers with a convolution; a config may list those with attention instead."""
    if config.gguf:
        return without_attention(config)
    fields, key = config.fields, "full_attn_idxs"
    if fields.raw("layer_types") is not None:
        kinds = layer_kinds(config, ("full_attention", "conv"))
        return tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")
    full = fields.raw(key)
    if full is None:
        return ()
    full = layer_numbers(config, key, full)
    return tuple(layer for layer in range(config["layers"]) if layer not in full)


def _tied(config: Config) -> bool:
    """Read whether the embedding is the head; an old key precedes today's, as in transformers."""
    key = "tie_embedding"
    stated = not config.gguf and config.fields.raw(key) is not None
    return config.fields.flag(key) if stated else tied(config)


FAMILIES = (
    Family(
        "lfm2", lfm2, {"lfm2": ("Lfm2ForCausalLM",)}, "lfm2",
        defaults={
            "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
            "rope_theta": 1e6, "conv_L_cache": 3, "tie_word_embeddings": True,
        },
        fields={
            "norm_eps": number("norm_eps", "attention.layer_norm_rms_epsilon", 1e-12, 1e-1),
            "intermediate": _inner, "qk_norm": True, "windows": no_windows, "tied_embedding": _tied,
            "recurrence.kind": "conv", "recurrence.layers": _layers,
            "recurrence.taps": integer("conv_L_cache", "shortconv.l_cache", 2, 16),
            "recurrence.channels": lambda config: config["hidden"],
            "recurrence.bias": flag("conv_bias", "", False),
        },
        allowed={**UNBIASED, **NO_WINDOW},
        names=Names(
            {
                "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
                "shortconv.out_proj": "conv.out_proj",
            },
            {
                "model.embedding_norm.": "model.norm.", ".operator_norm.": ".input_layernorm.",
                ".ffn_norm.": ".post_attention_layernorm.", ".feed_forward.w1.": ".mlp.gate_proj.",
                ".feed_forward.w3.": ".mlp.up_proj.", ".feed_forward.w2.": ".mlp.down_proj.",
                ".self_attn.out_proj.": ".self_attn.o_proj.", ".q_layernorm.": ".q_norm.",
                ".k_layernorm.": ".k_norm.",
            },
        ),
    ),
)  # fmt: skip
