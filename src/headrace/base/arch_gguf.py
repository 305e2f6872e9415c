"""Reader of GGUF metadata into a `ModelArch`.

GGUF leaves some of the architecture to the reader's own knowledge: Gemma's layer pattern and local
rope, whether q, k and v have a bias (seen in the tensor names), Llama 3's rope scaling (only its
result is stored, as the tensor `rope_freqs.weight`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from .arch import ModelArch, Rope
from .arch_fields import Fields
from .arch_gguf_states import gguf_recurrence, inner_sizes, kv_heads_of
from .arch_gguf_traits import (
    ACTIVATIONS,
    LAYER_NORMED,
    OWN,
    PARTLY_ROTATED,
    latent,
    mixture,
    plain,
    traits,
)
from .arch_gguf_uneven import gemma4
from .arch_traits import LATENT, NORMED
from .errors import ModelFileError, UnsupportedModel

GGUF_ARCHITECTURES = {
    "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "lfm2": "lfm2", "llama": "llama",
    "llama4": "llama4", "chatglm": "glm", "cohere2": "cohere2", "command-r": "cohere",
    "deepseek2": "deepseek_v2", "ernie4_5": "ernie4_5", "exaone4": "exaone4", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3": "gemma3", "gemma4": "gemma4", "glm4": "glm4",
    "glm4moe": "glm4_moe", "granite": "granite", "granitehybrid": "granitemoehybrid",
    "granitemoe": "granitemoe", "gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2",
    "nemotron_h": "nemotron_h", "olmo2": "olmo2", "olmoe": "olmoe", "phi3": "phi3",
    "qwen2moe": "qwen2_moe", "qwen35": "qwen3_5", "qwen3next": "qwen3_next",
    "qwen35moe": "qwen3_5_moe", "seed_oss": "seed_oss", "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}  # fmt: skip
"""Families by `general.architecture`. Mistral and Mixtral files call themselves llama."""

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_MAX_CONTEXT = 2**27
_LLAMA3 = {"low_freq_factor": 1.0, "original_context": 8192}
_HIGH = (4.0, 1.0)
"""Parameters that Llama 3.1, 3.2 and 3.3 share; only `factor` differs (8 or 32). Llama 4 has
another `high_freq_factor`."""

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
    "embedding_length_per_layer_input": (0,),
    "attention.temperature_scale": (0.0,),
    "interleave_moe_layer_step": (0, 1),
    "expert_group_count": (0, 1),
    "expert_gating_func": (0, 1),
}


def from_gguf(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    factors: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> ModelArch:
    """Read the architecture of a GGUF file.

    `factors`: the content of the tensors that are part of the rope, if the file has them:
    `rope_freqs.weight`, `rope_factors_short.weight`, `rope_factors_long.weight`. Each has half as
    many numbers as are rotated. Raises `UnsupportedModel` or `ModelFileError`, as `from_hf` does.
    """
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF: general.architecture is {kind!r:.80}; supported: "
            f"{', '.join(sorted(GGUF_ARCHITECTURES))}",
            param="general.architecture",
        )
    fields = Fields(metadata, "GGUF", f"{kind}.")
    family = GGUF_ARCHITECTURES[kind]
    if family == "olmo2" and fields.raw("attention.sliding_window"):
        family = "olmo3"
    if family == "deepseek_v2" and fields.raw("expert_gating_func") == 2:
        family = "deepseek_v3"
    for key, allowed in _NEUTRAL.items():
        if key not in OWN.get(family, ()):
            fields.expect(key, *allowed)
    if family == "gemma4":
        context = fields.integer("context_length", 1, _MAX_CONTEXT)
        if ROPE_FACTORS in tensor_names and ROPE_FACTORS not in factors:
            raise ModelFileError(f"GGUF: the content of {ROPE_FACTORS} was not read")
        words, divisors = _vocabulary(fields, metadata), factors.get(ROPE_FACTORS)
        return gemma4(fields, words, context, tensor_names, divisors)
    hidden = fields.integer("embedding_length", 1, 2**17)
    heads = fields.integer("attention.head_count", 1, 2**12)
    layers = fields.integer("block_count", 1, 2**10)
    # The layer that predicts a second token is counted as a layer, and not read.
    layers -= fields.integer("nextn_predict_layers", 0, layers - 1, 0)
    max_context = fields.integer("context_length", 1, _MAX_CONTEXT)
    mla = latent(fields) if family in LATENT else None
    if mla is None:
        head_dim = fields.integer("attention.key_length", 2, 2**12, max(hidden // heads, 1))
        kv_heads = kv_heads_of(fields, heads)
        fields.expect("attention.value_length", head_dim)
    else:
        head_dim, kv_heads = mla.nope_dim + mla.rope_dim, heads
    if heads % kv_heads:
        raise UnsupportedModel(
            f"GGUF: {kind}.attention.head_count is {heads}; "
            f"must be a multiple of head_count_kv ({kv_heads})"
        )
    if head_dim % 2:
        raise UnsupportedModel(f"GGUF: attention.key_length is {head_dim}; must be even")
    size = head_dim if mla is None else mla.rope_dim
    rope = _rope(fields, family, tensor_names, factors, size, max_context)
    moe = mixture(fields, family, tensor_names)
    if moe is not None and family == "llama":
        family = "mixtral"
    if family not in ("gemma2", "gemma3"):
        fields.expect("final_logit_softcapping", 0.0)
    extra = traits(fields, family, layers, hidden, heads, head_dim, max_context)
    fused = family == "glm" and "blk.0.attn_qkv.weight" in tensor_names
    if fused:
        extra["fused"] = ("qkv", "gate_up")
    eps = "layer_norm_epsilon" if family in LAYER_NORMED else "layer_norm_rms_epsilon"
    return ModelArch(
        family=family,
        vocab_size=_vocabulary(fields, metadata),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=max(inner_sizes(fields, layers))
        if family == "nemotron_h"
        else fields.integer("feed_forward_length", 1, 2**20, moe.intermediate if moe else None),
        max_context=max_context,
        norm_eps=plain(fields.number(f"attention.{eps}", 1e-12, 1e-1)),
        activation=ACTIVATIONS.get(family, "silu"),
        rope=rope,
        qkv_bias=f"blk.0.attn_q{'kv' * fused}.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        qk_norm=family in NORMED
        or (family == "glm4_moe" and "blk.0.attn_q_norm.weight" in tensor_names),
        tied_embedding="output.weight" not in tensor_names,
        moe=moe,
        mla=mla,
        recurrence=gguf_recurrence(fields, family, layers, hidden, tensor_names),
        **extra,
    )


def _vocabulary(fields: Fields, metadata: Mapping[str, Any]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str) else None
    return fields.integer("vocab_size", 1, 2**24, count)


def _rope(
    fields: Fields,
    family: str,
    tensor_names: Collection[str],
    contents: Mapping[str, Sequence[float]],
    head_dim: int,
    max_context: int,
) -> Rope:
    pairs = family in ("llama4", "glm", "glm4", "cohere", "cohere2", "ernie4_5", *LATENT)
    if family not in PARTLY_ROTATED:
        fields.expect("rope.dimension_count", head_dim)
    rotated = fields.integer("rope.dimension_count", 2, head_dim, head_dim)
    if rotated % 2:
        raise UnsupportedModel(f"GGUF: rope.dimension_count is {rotated}; must be even")
    for name in (ROPE_FACTORS, *LONG_FACTORS):
        if name in tensor_names and name not in contents:
            raise ModelFileError(f"GGUF: the content of {name} was not read")
    if family == "phi3" and LONG_FACTORS[0] in contents:
        rope = _long(fields, contents, rotated, max_context)
    else:
        rope = _scaled(fields, contents.get(ROPE_FACTORS), head_dim, max_context)
    # llama.cpp rounds the bounds of gpt-oss's ramp; the model was trained without rounding.
    whole = family != "gpt_oss"
    return replace(rope, share=rotated / head_dim, interleaved=pairs, truncate=whole)


def _long(
    fields: Fields, contents: Mapping[str, Sequence[float]], rotated: int, max_context: int
) -> Rope:
    """Read LongRoPE (Ding et al. 2024) in Phi's form."""
    fields.expect("rope.scaling.type", "none", "longrope")
    short, long = (tuple(map(plain, contents.get(name, ()))) for name in LONG_FACTORS)
    for name, each in zip(LONG_FACTORS, (short, long), strict=True):
        if len(each) != rotated // 2 or not all(1e-3 <= one <= 1e5 for one in each):
            raise ModelFileError(
                f"GGUF: {name} must hold {rotated // 2} numbers from 0.001 to 100000"
            )
    return Rope(
        theta=plain(fields.number("rope.freq_base", 1.0, 1e12, 1e4)),
        kind="long",
        original_context=fields.integer(
            "rope.scaling.original_context_length", 2, _MAX_CONTEXT, max_context
        ),
        attention_factor=plain(fields.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0)),
        short=short,
        long=long,
    )


def _scaled(
    fields: Fields, factors: Sequence[float] | None, head_dim: int, max_context: int
) -> Rope:
    default = 1e6 if fields.prefix == "gemma3." else 1e4
    theta = plain(fields.number("rope.freq_base", 1.0, 1e12, default))
    kind = fields.word("rope.scaling.type", ("none", "linear", "yarn"), "none")
    if factors is not None:
        if kind != "none":
            raise UnsupportedModel(f"GGUF: {ROPE_FACTORS} together with rope.scaling.type {kind}")
        return llama3_rope(theta, factors, head_dim)
    if kind == "none":
        return Rope(theta=theta)
    factor = plain(fields.number("rope.scaling.factor", 1.0, 1e4))
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=factor)
    stretched: Literal["yarn"] = "yarn"
    extra = fields.number("rope.scaling.attn_factor", 0.0, 1e3, 1.0)
    growth = 0.1 * math.log(factor) + 1.0
    if fields.prefix == "deepseek2." and fields.raw("rope.scaling.yarn_log_multiplier"):
        growth = 1.0  # Part of the attention scale: see `grown`.
    else:
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
        attention_factor=extra * growth,
    )


def llama3_rope(theta: float, factors: Sequence[float], head_dim: int) -> Rope:
    """Return the Llama 3.1 scaling whose frequency divisors [head_dim / 2] are `factors`.

    Only the divisors are stored, so the parameters are recovered. The largest divisor is the
    factor; the others are the same for the whole family. They must reproduce every divisor to 1e-4.
    """
    if len(factors) != head_dim // 2 or not all(math.isfinite(f) and f >= 1.0 for f in factors):
        raise ModelFileError(
            f"GGUF: {ROPE_FACTORS} must hold {head_dim // 2} finite numbers from 1 up"
        )
    factor = plain(max(factors))
    if factor == 1.0:
        return Rope(theta=theta)
    wrong = 0
    for high in _HIGH:
        own = {**_LLAMA3, "factor": factor, "high_freq_factor": high}
        rope = Rope(theta=theta, kind="llama3", **own)  # type: ignore[arg-type]
        each = (llama3_divisor(rope, i, head_dim) for i in range(len(factors)))
        alike = [math.isclose(*both, rel_tol=1e-4) for both in zip(factors, each, strict=True)]
        if all(alike):
            return rope
        wrong = wrong or alike.index(False)
    raise UnsupportedModel(
        f"GGUF: {ROPE_FACTORS}[{wrong}] is {factors[wrong]:g}; supported: the scaling of "
        "Llama 3.1, 3.2, 3.3 and 4",
        param=ROPE_FACTORS,
    )


def llama3_divisor(rope: Rope, i: int, head_dim: int) -> float:
    """Return the divisor of frequency i of a head (Llama 3.1, section 3.4)."""
    wavelength: float = 2 * math.pi * rope.theta ** (2 * i / head_dim)
    if wavelength < rope.original_context / rope.high_freq_factor:
        return 1.0
    if wavelength > rope.original_context / rope.low_freq_factor:
        return rope.factor
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / span
    return 1.0 / ((1.0 - smooth) / rope.factor + smooth)
