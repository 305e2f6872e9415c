"""Phi-3 and Phi-4-mini (Microsoft 2024, 2025): fused products, and positions stretched by a
separate factor for each frequency."""

from __future__ import annotations

import math

from ..base.arch import Rope
from ..base.errors import ModelFileError
from .common import UNBIASED
from .family import Config, Family, Names, integer, plain
from .llama import llama
from .ropes import (
    FACTOR,
    GROWN,
    LONG_FACTORS,
    MAX_CONTEXT,
    THETA,
    parameters,
    rope_of,
    rotated,
    share,
    within,
)
from .windows import WINDOW

_ORIGINAL = integer(
    "original_max_position_embeddings",
    "rope.scaling.original_context_length",
    2,
    MAX_CONTEXT,
    4096,
)
_LONG = ("default", "longrope", "su", "yarn")


def _rope(config: Config) -> Rope:
    """Read a plain rope, or LongRoPE (Ding et al. 2024)."""
    if config.gguf:
        if LONG_FACTORS[0] not in config.factors:
            return rope_of(config, {})
        rotated(config)
        config.fields.expect("rope.scaling.type", "none", "longrope")
        original = config.read(_ORIGINAL, config["max_context"])
        return _long(config, config, original, config.read(GROWN, 1.0))
    given = parameters(config)
    given.pop("partial_rotary_factor", None)
    inner = within(config, given)
    key = "rope_type" if inner.fields.raw("rope_type") is not None else "type"
    if inner.fields.word(key, _LONG, "default") == "default":
        return rope_of(config, given)
    own = inner.fields.raw(_ORIGINAL.hf[0]) is not None
    original = (inner if own else config).read(_ORIGINAL)
    stretch = inner.read(FACTOR, max(config["max_context"] / original, 1.0))
    grown = inner.read(GROWN._replace(low=1e-3))
    if grown is None:
        grown = math.sqrt(1 + math.log(stretch) / math.log(original))
    return _long(config, inner, original, grown)


def _long(config: Config, inner: Config, original: int, grown: float) -> Rope:
    pairs = int(config["head_dim"] * config["rope.share"]) // 2
    return Rope(
        inner.read(THETA, config.read(THETA)),
        "long",
        original_context=original,
        attention_factor=grown,
        short=_factors(inner, "short", pairs),
        long=_factors(inner, "long", pairs),
    )


def _factors(config: Config, length: str, pairs: int) -> tuple[float, ...]:
    """Read the divisors of the frequencies, which are a tensor in GGUF."""
    key = f"rope_factors_{length}.weight" if config.gguf else f"{length}_factor"
    given = list(config.factors.get(key, ())) if config.gguf else config.fields.raw(key)
    numbers = isinstance(given, list) and all(type(one) in (int, float) for one in given)
    if not numbers or len(given) != pairs or not all(1e-3 <= one <= 1e5 for one in given):
        raise ModelFileError(
            f"{config.fields.where}: {key} must be a list of {pairs} numbers from 0.001 to 100000",
            param=key,
        )
    return tuple(plain(one) if config.gguf else float(one) for one in given)


FAMILIES = (
    Family(
        "phi3", llama, {"phi3": ("Phi3ForCausalLM",)}, "phi3",
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        fields={"rope": _rope, "rope.share": share, "fused": ("qkv", "gate_up"), "_window": WINDOW},
        allowed=UNBIASED,
        own=("partial_rotary_factor",),
        names=Names({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    ),
)  # fmt: skip
