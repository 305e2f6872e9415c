"""Llama 4 (Meta 2025), text: attention in chunks, layers without positions whose queries are
scaled, and experts whose inputs the router scales."""

from __future__ import annotations

from ..base.errors import ModelFileError, UnsupportedModel
from .common import LOCAL_APART, SHARED_NAMES, UNBIASED
from .family import Config, Family, Names, flag, integer, number
from .gemma import VISION
from .llama import llama
from .windows import Windows, layer_numbers, unrotated

_TUNED = flag("attn_temperature_tuning", "", True)
_GROWTH = number("attn_scale", "", 0.0, 1e3, 0.1)
_NORMED = flag("use_qk_norm", "", True)
_CHUNK = integer("attention_chunk_size", "attention.chunk_size", 1, 2**27, 8192, null=True)
_STEP = integer("interleave_moe_layer_step", "interleave_moe_layer_step", 1, 2**10)


def _chunks(config: Config) -> Windows:
    """Return the chunk of each layer: those with positions attend within chunks. () if no chunk is
    shorter than the context."""
    fields, size, layers = config.fields, config.read(_CHUNK), config["layers"]
    chunked = [not one for one in config["nope"]]
    if config.gguf:
        fields.expect("attention.sliding_window", size)
    elif (kinds := fields.raw("layer_types")) is not None:
        allowed = ("chunked_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or set(map(str, kinds)) - {*allowed}:
            raise UnsupportedModel(
                f"{fields.where}: layer_types must be {layers} of {', '.join(allowed)}",
                param="layer_types",
            )
        chunked = [kind == allowed[0] for kind in kinds]
        if size is None and any(chunked):
            raise ModelFileError(
                f"{fields.where}: {_CHUNK.hf[0]} is null, but layer_types has {allowed[0]}",
                param=_CHUNK.hf[0],
            )
    if size is None or size >= config["max_context"]:
        return ()
    return tuple(size if one else None for one in chunked)


def _normed(config: Config) -> bool:
    """Return whether heads have norms; in GGUF Maverick, with 128 experts, has none."""
    return config["moe.experts"] != 128 if config.gguf else bool(config.read(_NORMED))


def _growth(config: Config) -> float:
    return float(config.read(_GROWTH)) if config.read(_TUNED) else 0.0


def _dense(config: Config) -> tuple[int, ...]:
    """Return the layers without experts: all except every n-th, or except those listed."""
    fields, layers = config.fields, config["layers"]
    named = None if config.gguf else fields.raw("moe_layers")
    step = config.read(_STEP) if config.gguf else config.read(_STEP, 1)
    mixing = list(range(step - 1, layers, step))
    if named is not None:
        mixing = layer_numbers(config, "moe_layers", named)
    return tuple(layer for layer in range(layers) if layer not in mixing)


FAMILIES = (
    Family(
        "llama4", llama,
        {"llama4": ("Llama4ForConditionalGeneration",), "llama4_text": ("Llama4ForCausalLM",)},
        "llama4",
        defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5, "rope_theta": 5e5, "num_local_experts": 16,
            "num_experts_per_tok": 1, "intermediate_size_mlp": 16384,
        },
        fields={
            **LOCAL_APART, "moe.normalise": False,
            "moe.shared_intermediate": lambda config: config["moe.intermediate"],
            "moe.dense_at": _dense, "moe.scores": "sigmoid", "moe.inside": True,
            "intermediate": integer("intermediate_size_mlp", "feed_forward_length", 1, 2**20),
            "rope.interleaved": True, "nope": unrotated, "windows": _chunks,
            "chunks.normed": _normed, "chunks.growth": _growth,
            "chunks.every": integer("floor_scale", "", 1, 2**27, 8192),
        },
        allowed=UNBIASED,
        own=(
            "no_rope_layers", "attention_chunk_size", "attn_temperature_tuning", "use_qk_norm",
            "interleave_moe_layer_step",
        ),
        names=Names(
            SHARED_NAMES,
            {
                ".feed_forward.": ".mlp.", ".mlp.router.": ".mlp.gate.",
                ".mlp.shared_expert.": ".mlp.shared_experts.",
            },
            VISION, transposed="halves",
        ),
    ),
)  # fmt: skip
