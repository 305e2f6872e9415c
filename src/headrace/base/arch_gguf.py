"""Reads GGUF metadata into a `ModelArch`.

GGUF leaves some of the architecture to the reader's own knowledge: Gemma's layer pattern and
local rope, whether q, k and v have a bias (seen in the tensor names), Llama 3's rope scaling
(only its result is stored, as the tensor `rope_freqs.weight`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from .arch import ModelArch, Moe, Rope
from .arch_fields import Fields
from .errors import ModelFileError, UnsupportedModel

GGUF_ARCHITECTURES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "llama": "llama",
    "gemma3": "gemma3",
}
"""`general.architecture` → family. Mistral and Mixtral files call themselves llama."""

ROPE_FACTORS = "rope_freqs.weight"
_MAX_CONTEXT = 2**27
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context": 8192}
"""The parameters that Llama 3.1, 3.2 and 3.3 share; only `factor` differs (8 or 32)."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.q_lora_rank": (0,),
    "attention.kv_lora_rank": (0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "use_parallel_residual": (False,),
    "attn_logit_softcapping": (0.0,),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "leading_dense_block_count": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0.0,),
    "interleave_moe_layer_step": (0, 1),
    "expert_group_count": (0, 1),
}


def from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    rope_factors: Sequence[float] | None = None,
) -> ModelArch:
    """The architecture of a GGUF file.

    `rope_factors` is the content of `rope_freqs.weight` [head_dim / 2] where the file has it.
    Raises `UnsupportedModel` or `ModelFileError`, as `from_hf` does.
    """
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF: general.architecture is {kind!r:.80}; supported: "
            f"{', '.join(sorted(GGUF_ARCHITECTURES))}",
            param="general.architecture",
        )
    fields = Fields(metadata, "GGUF", f"{kind}.")
    for key, allowed in _NEUTRAL.items():
        fields.expect(key, *allowed)
    family = GGUF_ARCHITECTURES[kind]
    hidden = fields.integer("embedding_length", 1, 2**17)
    heads = fields.integer("attention.head_count", 1, 2**12)
    layers = fields.integer("block_count", 1, 2**10)
    head_dim = fields.integer("attention.key_length", 2, 2**12, max(hidden // heads, 1))
    kv_heads = fields.integer("attention.head_count_kv", 1, heads, heads)
    max_context = fields.integer("context_length", 1, _MAX_CONTEXT)
    fields.expect("attention.value_length", head_dim)
    fields.expect("rope.dimension_count", head_dim)
    if heads % kv_heads:
        raise UnsupportedModel(
            f"GGUF: {kind}.attention.head_count is {heads}; "
            f"must be a multiple of head_count_kv ({kv_heads})"
        )
    if head_dim % 2:
        raise UnsupportedModel(f"GGUF: attention.key_length is {head_dim}; must be even")
    rope = _rope(fields, tensor_names, rope_factors, head_dim, max_context)
    moe = _moe(fields, family)
    if moe is not None and family == "llama":
        family = "mixtral"
    gemma = _gemma(fields, layers, hidden, heads, head_dim) if family == "gemma3" else {}
    if not gemma:
        fields.expect("final_logit_softcapping", 0.0)
        fields.expect("attention.sliding_window", 0, max_context)
    return ModelArch(
        family=family,
        vocab_size=_vocabulary(fields, metadata),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=fields.integer(
            "feed_forward_length", 1, 2**20, moe.intermediate if moe else None
        ),
        max_context=max_context,
        norm_eps=_plain(fields.number("attention.layer_norm_rms_epsilon", 1e-12, 1e-1)),
        activation="gelu_tanh" if gemma else "silu",
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3"),
        tied_embedding="output.weight" not in tensor_names,
        moe=moe,
        **gemma,
    )


def _plain(value: float) -> float:
    """A number that was stored in fp32, as its author wrote it: 1e-06, not 9.99999997e-07."""
    return float(f"{value:.7g}")


def _vocabulary(fields: Fields, metadata: Mapping[str, Any]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str) else None
    return fields.integer("vocab_size", 1, 2**24, count)


def _moe(fields: Fields, family: str) -> Moe | None:
    experts = fields.integer("expert_count", 0, 2**12, 0)
    if not experts:
        return None
    if family not in ("llama", "qwen3_moe"):
        raise UnsupportedModel(
            f"GGUF: {fields.prefix}expert_count is {experts}; "
            "experts are supported for llama and qwen3moe",
            param="expert_count",
        )
    width = "feed_forward_length" if family == "llama" else "expert_feed_forward_length"
    return Moe(
        experts=experts,
        active=fields.integer("expert_used_count", 1, experts),
        intermediate=fields.integer(width, 1, 2**20),
        normalise=fields.flag("expert_weights_norm", True),
    )


def _gemma(fields: Fields, layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Gemma 3: what the format leaves to the reader (five windowed layers, then a full one)."""
    window = fields.integer("attention.sliding_window", 1, _MAX_CONTEXT)
    pattern = fields.integer("attention.sliding_window_pattern", 1, 2**10, 6)
    # The 27B model alone (62 layers) scales by hidden / heads instead of the head's size.
    scalar = hidden / heads if layers == 62 else head_dim
    cap = fields.optional_number("final_logit_softcapping", 0.0, 1e6)
    return {
        "windows": tuple(None if (i + 1) % pattern == 0 else window for i in range(layers)),
        "local_rope": Rope(theta=_plain(fields.number("rope.freq_base_swa", 1.0, 1e12, 1e4))),
        "embedding_scale": math.sqrt(hidden),
        "norm_offset": 1.0,
        "attention_scale": scalar**-0.5,
        "final_softcap": cap or None,
    }


def _rope(
    fields: Fields,
    tensor_names: Collection[str],
    factors: Sequence[float] | None,
    head_dim: int,
    max_context: int,
) -> Rope:
    default = 1e6 if fields.prefix == "gemma3." else 1e4
    theta = _plain(fields.number("rope.freq_base", 1.0, 1e12, default))
    kind = fields.word("rope.scaling.type", ("none", "linear", "yarn"), "none")
    if factors is None and ROPE_FACTORS in tensor_names:
        raise ModelFileError(f"GGUF: the content of {ROPE_FACTORS} was not read")
    if factors is not None:
        if kind != "none":
            raise UnsupportedModel(f"GGUF: {ROPE_FACTORS} together with rope.scaling.type {kind}")
        return llama3_rope(theta, factors, head_dim)
    if kind == "none":
        return Rope(theta=theta)
    factor = _plain(fields.number("rope.scaling.factor", 1.0, 1e4))
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    stretched: Literal["yarn"] = "yarn"
    extra = fields.number("rope.scaling.attn_factor", 0.0, 1e3, 1.0)
    fields.expect("rope.scaling.yarn_log_multiplier", 0.0)
    fields.expect("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    fields.expect("rope.scaling.yarn_attn_factor", 1.0, -1.0)
    return Rope(
        theta=theta,
        kind=stretched,
        factor=factor,
        original_context=fields.integer(
            "rope.scaling.original_context_length", 1, _MAX_CONTEXT, max_context
        ),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e5, 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e5, 1.0),
        attention_factor=extra * (0.1 * math.log(factor) + 1.0),
    )


def llama3_rope(theta: float, factors: Sequence[float], head_dim: int) -> Rope:
    """The Llama 3.1 scaling whose frequency divisors [head_dim / 2] are `factors`.

    Only the divisors are stored; the parameters are found again (the largest divisor is the
    factor, the rest is the same for the whole family) and must reproduce every divisor to 1e-4.
    """
    if len(factors) != head_dim // 2 or not all(math.isfinite(f) and f >= 1.0 for f in factors):
        raise ModelFileError(
            f"GGUF: {ROPE_FACTORS} must hold {head_dim // 2} finite numbers from 1 up"
        )
    factor = _plain(max(factors))
    if factor == 1.0:
        return Rope(theta=theta)
    rope = Rope(theta=theta, kind="llama3", factor=factor, **_LLAMA3)  # type: ignore[arg-type]
    for i, found in enumerate(factors):
        if not math.isclose(found, llama3_divisor(rope, i, head_dim), rel_tol=1e-4):
            raise UnsupportedModel(
                f"GGUF: {ROPE_FACTORS}[{i}] is {found:g}; supported: the scaling of "
                "Llama 3.1, 3.2 and 3.3",
                param=ROPE_FACTORS,
            )
    return rope


def llama3_divisor(rope: Rope, i: int, head_dim: int) -> float:
    """By how much frequency i of a head is divided (Llama 3.1, section 3.4)."""
    wavelength: float = 2 * math.pi * rope.theta ** (2 * i / head_dim)
    if wavelength < rope.original_context / rope.high_freq_factor:
        return 1.0
    if wavelength > rope.original_context / rope.low_freq_factor:
        return rope.factor
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / span
    return 1.0 / ((1.0 - smooth) / rope.factor + smooth)
