"""Bytes of numbers: activations, weights and the KV of one token."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.errors import OptionError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
SCALED_KV = ("fp8", "int8")
"""KV types that keep one fp32 scale per token, head and side (`kernels.operators.KvLayer`)."""

WEIGHT_BITS = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "float16": 16.0,
    "fp8": 8.0,
    "int8": 8.0 + 32 / 128,
    "int4": 4.0 + 32 / 64,
    "nvfp4": 4.0 + 8 / 16,
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q8_0": 8.5,
    "Q4_K": 4.5,
    "Q5_K": 5.5,
    "Q6_K": 6.5625,
}
"""Bits per weight with scales and offsets. int8: one fp32 scale per 128; int4: fp16 scale and
offset per 64; nvfp4: an fp8 scale per 16; the ggml types from their block layouts."""


def dtype_bytes(dtype: str, param: str = "dtype") -> int:
    """Bytes of one number of an activation or KV type; `OptionError` for an unknown one."""
    if dtype not in DTYPE_BYTES:
        raise OptionError(
            f"{param} must be one of {', '.join(DTYPE_BYTES)}, not {dtype!r}", param=param
        )
    return DTYPE_BYTES[dtype]


def weight_bits(name: str) -> float:
    """Bits per weight of a format, scales included; `OptionError` for an unknown one."""
    if name not in WEIGHT_BITS:
        raise OptionError(
            f"weight format must be one of {', '.join(WEIGHT_BITS)}, not {name!r}", param="format"
        )
    return WEIGHT_BITS[name]


def kv_token_bytes(arch: ModelArch, kv_dtype: str) -> int:
    """Bytes that one token adds to the KV of one layer.

    Keys and values: 2 · G · E · b, and 2 · G · 4 for the scales of an int8 or fp8 cache.
    Latent attention (MLA) keeps kv_rank + rope_dim numbers instead, with one scale.
    """
    width = dtype_bytes(kv_dtype, "kv_dtype")
    scale = 4 if kv_dtype in SCALED_KV else 0
    if arch.mla is not None:
        return (arch.mla.kv_rank + arch.mla.rope_dim) * width + scale
    return 2 * arch.kv_heads * (arch.head_dim * width + scale)
