"""Quantisation that a safetensors checkpoint declares: `quantization_config`, key by key.

Torch-free: `loader.open` refuses here checkpoints that `quant.checkpoint` cannot load. Supported
are AWQ (4 bits, "gemm" order), GPTQ (4 and 8 bits, with activation order), compressed-tensors INT4
and INT8 (packed or plain), FP8 and NVFP4, and the plain FP8 of Hugging Face (by tensor, or in
blocks of 128 x 128).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from ..kernels.weights import FP8_BLOCK

NVFP4_FORMAT = "nvfp4-pack-quantized"
NVFP4_GROUP = 16
"""Numbers of NVFP4 that share a scale."""
GROUPS = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage of a checkpoint's quantised matrices."""

    layout: str
    """Key of `quant.checkpoint.LAYOUTS`: "awq", "gptq", "packed", "int8", "nvfp4" or "fp8"."""
    bits: int
    group: int | None
    """Number of inputs that share a scale; None: all of a row."""
    zero_shift: int = 0
    """Number added to a stored zero point (GPTQ's first format stores it less one)."""
    strategy: str = ""
    """Numbers that share an fp8 scale: "tensor", "channel" (an output row) or "block" (128 x
    128)."""


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a `config.json`, or None if its weights are dense.

    Raises `UnsupportedModel` naming the key and the supported values.
    """
    outer = Fields(config, "config.json")
    found = outer.mapping("quantization_config")
    if found is None:
        return None
    fields = Fields(found, "config.json", defaults={})
    method = fields.word("quant_method", (*METHODS, "mxfp4"))
    # MXFP4's tensors are recognised by their names: the experts of gpt-oss.
    return METHODS[method](fields) if method in METHODS else None


def _awq(fields: Fields) -> Scheme:
    fields.word("version", ("gemm", "GEMM"), "gemm")
    fields.expect("zero_point", True)
    bits_key = "bits" if fields.raw("bits") is not None else "w_bit"
    group_key = "group_size" if fields.raw("group_size") is not None else "q_group_size"
    fields.integer(bits_key, 4, 4, 4)
    return Scheme("awq", 4, _group(fields, group_key))


def _gptq(fields: Fields) -> Scheme:
    bits = fields.integer("bits", 4, 8)
    if bits not in (4, 8):
        raise UnsupportedModel(f"config.json: bits is {bits}; supported: 4 and 8", param="bits")
    stored = fields.word("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    return Scheme("gptq", bits, _group(fields, "group_size"), 1 if stored == "gptq" else 0)


def _compressed(fields: Fields) -> Scheme | None:
    if fields.raw("kv_cache_scheme") is not None and not fields.raw("config_groups"):
        return None  # Dense weights, with scales of a KV cache: `loader.names.kv_scales`.
    layout = fields.word(
        "format", ("pack-quantized", "int-quantized", "float-quantized", NVFP4_FORMAT)
    )
    groups = fields.mapping("config_groups")
    if not groups or len(groups) != 1:
        raise UnsupportedModel(
            "config.json: config_groups must have one group: all quantised layers alike",
            param="config_groups",
        )
    group = next(iter(groups.values()))
    if not isinstance(group, dict):
        raise ModelFileError("config.json: config_groups must hold objects", param="config_groups")
    inner = Fields(group, "config.json config_groups")
    weights = inner.mapping("weights")
    if weights is None:
        raise ModelFileError("config.json: config_groups lacks weights", param="weights")
    activations = inner.mapping("input_activations")
    if layout == NVFP4_FORMAT:
        return _nvfp4(Fields(weights, "config.json weights"))
    if activations is not None and layout != "float-quantized":
        # Kernels quantise activations on the fly by themselves; stored scales are not read.
        Fields(activations, "config.json input_activations").expect("dynamic", True)
    fields = Fields(weights, "config.json weights")
    if layout == "float-quantized":
        return _compressed_fp8(fields, activations)
    fields.word("type", ("int",))
    packed = layout == "pack-quantized"
    bits = fields.integer("num_bits", 4, 8)
    fields.expect("dynamic", False)
    fields.expect("actorder", False, "static", "weight", *(["group"] if packed else []))
    strategy = fields.word("strategy", ("group", "channel", "tensor"))
    if bits not in (4, 8) or (layout == "int-quantized" and bits != 8):
        raise UnsupportedModel(
            f"config.json: num_bits is {bits} in {layout}; supported: 4 or 8 packed, 8 plain",
            param="num_bits",
        )
    size = _group(fields, "group_size") if strategy == "group" else None
    return Scheme("packed" if packed else "int8", bits, size)


def _nvfp4(fields: Fields) -> Scheme:
    fields.word("type", ("float",))
    fields.integer("num_bits", 4, 4)
    fields.expect("symmetric", True)
    fields.word("strategy", ("tensor_group", "group"))
    fields.integer("group_size", NVFP4_GROUP, NVFP4_GROUP)
    return Scheme("nvfp4", 8, NVFP4_GROUP)  # Twice a number is whole: a code of eight bits.


def _compressed_fp8(fields: Fields, activations: Mapping[str, Any] | None) -> Scheme:
    fields.word("type", ("float",))
    fields.integer("num_bits", 8, 8)
    fields.expect("dynamic", False)
    fields.expect("symmetric", True)
    strategy = fields.word("strategy", ("tensor", "channel", "block"))
    if strategy == "block":
        fields.expect("block_structure", [FP8_BLOCK, FP8_BLOCK], "128x128")
    if activations is not None:
        # Per row or block on the fly, or one stored scale: in each case kernels measure each row.
        Fields(activations, "config.json input_activations").word("type", ("float",))
    return Scheme("fp8", 8, None, strategy=strategy)


def _fp8(fields: Fields) -> Scheme:
    """Read Hugging Face's "fp8": blocks if `weight_block_size` is given, else one scale."""
    fields.expect("fmt", "e4m3", "float8_e4m3fn")
    fields.word("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.expect("weight_block_size", [FP8_BLOCK, FP8_BLOCK])
    blocked = fields.raw("weight_block_size") is not None
    return Scheme("fp8", 8, None, strategy="block" if blocked else "tensor")


def _group(fields: Fields, key: str) -> int | None:
    size = fields.integer(key, -1, max(GROUPS))
    if size != -1 and size not in GROUPS:
        raise UnsupportedModel(
            f"config.json: {key} is {size}; supported: -1 and {', '.join(map(str, GROUPS))}",
            param=key,
        )
    return None if size == -1 else size


METHODS: Mapping[str, Callable[[Fields], Scheme | None]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}
