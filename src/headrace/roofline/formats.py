"""Bytes of numbers: activations, weights and the KV of one token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ..base.arch import ModelArch
from ..base.errors import OptionError
from ..base.graph import AttentionSpec, LatentSpec
from ..base.groups import ARRAY_BYTES, KV_DTYPES, graph_groups, kept_arrays, kept_bytes
from ..models.registry import describe

WEIGHT_BITS = {
    "float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8": 8.0, "int8": 8.0 + 32 / 128,
    "int4": 4.0 + 32 / 64, "nvfp4": 4.0 + 8 / 16, "mxfp4": 4.0 + 8 / 32, "Q2_K": 2.625,
    "Q3_K": 3.4375, "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q4_K": 4.5,
    "Q5_K": 5.5, "Q6_K": 6.5625, "IQ1_S": 1.5625, "IQ1_M": 1.75, "IQ2_XXS": 2.0625,
    "IQ2_XS": 2.3125, "IQ2_S": 2.5625, "IQ3_XXS": 3.0625, "IQ3_S": 3.4375, "IQ4_NL": 4.5,
    "IQ4_XS": 4.25, "TQ1_0": 1.6875, "TQ2_0": 2.0625,
}  # fmt: skip
"""Bits per weight with scales and offsets. int8: one fp32 scale per 128; int4: fp16 scale and
offset per 64; nvfp4: an fp8 scale per 16, mxfp4 per 32; the ggml types from their block layouts."""

GGML = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "MXFP4": "mxfp4"}
"""Types of GGUF files that have another name here."""
BOUND_BITS = {WEIGHT_BITS["Q8_0"]: 5.0 + 16 / 32}
"""Bits per weight of a head → bits that bound all its logits, which a greedy step reads at least:
five of eight and the scales. The rest is read only for rows that may be the largest, at best for no
row (ADR 0024)."""


def dtype_bytes(dtype: str, param: str = "dtype") -> int:
    """Return the bytes of a number of an activation or KV type; `OptionError` if unknown."""
    if dtype not in ARRAY_BYTES:
        raise OptionError(
            f"{param} must be one of {', '.join(ARRAY_BYTES)}, not {dtype!r}", param=param
        )
    return ARRAY_BYTES[dtype]


def weight_bits(name: str) -> float:
    """Return the bits per weight of a format, scales included; `OptionError` for an unknown one."""
    if name not in WEIGHT_BITS:
        raise OptionError(
            f"weight format must be one of {', '.join(WEIGHT_BITS)}, not {name!r}", param="format"
        )
    return WEIGHT_BITS[name]


def usual_format(counts: Mapping[str, int], otherwise: str) -> str:
    """Return the known format with the most bytes."""
    known = [(count, name) for name, count in counts.items() if name in WEIGHT_BITS]
    return max(known)[1] if known else otherwise


def check_kv_dtype(kv_dtype: str) -> None:
    """Raise `OptionError` for an unknown type of a KV cache."""
    if kv_dtype not in KV_DTYPES:
        raise OptionError(
            f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {kv_dtype!r}", param="kv_dtype"
        )


@lru_cache(maxsize=256)
def kv_token_bytes(spec: AttentionSpec | LatentSpec, kv_dtype: str) -> int:
    """Return the bytes that one token adds to a layer's KV (see `base.groups.kept_arrays`)."""
    check_kv_dtype(kv_dtype)
    return kept_bytes(kept_arrays(spec, kv_dtype))


def kv_bytes_of_all(arch: ModelArch, kv_dtype: str) -> int:
    """Return the bytes that one token adds to the KV of all layers together, inside every
    window."""
    kept = [group for group in graph_groups(describe(arch), kv_dtype) if not group.state]
    return sum(len(group.layers) * kept_bytes(group.arrays) for group in kept)
