"""Mirror of csrc/records.h, field by field; `library` checks the sizes when it loads."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_float, c_int8, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

KINDS = {
    "Q4_0": 1, "Q4_1": 2, "Q5_0": 3, "Q5_1": 4, "Q8_0": 5, "Q4_K": 6, "Q5_K": 7, "Q6_K": 8,
    "Q8_0_PLANES": 9, "MXFP4": 10, "INT4": 11, "INT8": 12, "F32": 16, "F16": 17, "BF16": 18,
    "E4M3": 21,
}  # fmt: skip
KV_I8 = 19
"""Kind of a KV cache of int8 codes with scales; it is not a kind of weights."""
KV_K8V4 = 20
"""Kind of such a cache with V in four bits."""
_NAMES = ("silu", "gelu_tanh", "gelu", "tanh", "clamped", "sigmoid", "relu2")
ACTIVATIONS = {name: number for number, name in enumerate(_NAMES)}
VALUES = {name: number for number, name in enumerate(("own", "normed", "keys", "elsewhere"))}
INDICES = {"tokens": 0, "positions": 1, "types": 2}
"""Number of each of a step's arrays that can index the rows of a table."""
ACTIVATED = 4
"""HrInto of a product that goes through an activation: this plus the activation's number."""
ROWS_N, ROWS_R = 0, 1
EMBED, NORM, QUANTISE, LINEAR, ROPE, ATTENTION, GATED, SELECT, ADD, SOFTCAP, GATE_UP = range(1, 12)
LAYER_NORM, ACTIVATE, BIDIRECTIONAL, ROUTE, PLACE, EXPERTS_UP, EXPERTS_DOWN, SCALE = range(12, 20)
LORA_DOWN, LORA_UP, DRAW, BEST, PICK, SAMPLE, BOUND, HEADS, COLUMNS = range(20, 29)
CONV, RECURRENCE, MULTIPLY, EXCHANGE, AGREE, LOWER, HANDOVER, EXPERTS_SUM, SCATTER = range(29, 38)
BOUNDED = 4
"""Most rows for which bounding the logits first is worth it (docs/kernels.md): HR_BOUNDED."""
MAX_GROUPS = 16
SIX = 6
"""Number of rows of quantised activations that are interleaved."""
UNIT = 32
"""Number of activations that share a scale."""

TYPES: dict[str, Any] = {"P": c_void_p, "I": c_int32, "L": c_int64, "U": c_uint64, "C": c_int8}
TYPES |= {"F": c_float, "D": c_double}


def laid(text: str) -> list[tuple[str, Any]]:
    """Return the fields of a struct, from `type name name; type name; …`. `type`: one of `TYPES`,
    or a struct of this module; `type*n`: an array of n."""
    fields = []
    for line in text.split(";"):
        kind, *names = line.split()
        kind, _, count = kind.partition("*")
        type_ = TYPES.get(kind) or globals()[kind]
        fields += [(name, type_ * int(count) if count else type_) for name in names]
    return fields


class HrUnit(Structure):
    _fields_ = laid("F scale sum; I low32 high32 all16 all128")


class HrLane(Structure):
    _fields_ = laid("C*32 codes; HrUnit unit; I*2 unused")


class HrSix(Structure):
    _fields_ = laid("HrLane*6 lanes")


class HrQuantised(Structure):
    _fields_ = laid("P six; L stride")


class HrPart(Structure):
    _fields_ = laid("P data low bias y; L y_stride; I kind out in_ accumulate")


class HrLinear(Structure):
    _fields_ = laid("HrQuantised x; P dense; L dense_stride; P parts; I count rows")


class HrHeads(Structure):
    _fields_ = laid("HrLinear linear; L first step")


class HrColumns(Structure):
    _fields_ = laid("P x; L x_stride; P y; L y_stride x_step y_step; I size times rows unused")


class HrEmbed(Structure):
    _fields_ = laid("P data; L row_bytes; P y; L y_stride; F scale; I kind vocab size index unused")


class HrScatter(Structure):
    _fields_ = laid("P x; L x_stride; P places; L count; P y; L y_stride; I size unused")


class HrNorm(Structure):
    _fields_ = laid(
        "P x; L x_stride; P residual; L residual_stride; P weight y; L y_stride; HrQuantised q; F "
        "eps offset; I size rows"
    )


class HrLayerNorm(Structure):
    _fields_ = laid(
        "P x; L x_stride; P residual; L residual_stride; P weight bias y; L y_stride; HrQuantised "
        "q; F eps; I size rows unused"
    )


class HrQuantise(Structure):
    _fields_ = laid("P x; L x_stride; HrQuantised q; P order; I size rows")


class HrGated(Structure):
    _fields_ = laid(
        "P x; L x_stride; P y; L y_stride; HrQuantised q; I size activation rows unused"
    )


class HrRowsOp(Structure):
    _fields_ = laid("P x; L x_stride; P y; L y_stride; I size rows; F factor; I unused")


class HrKv(Structure):
    _fields_ = laid(
        "P k v k_scale v_scale; I kind block_size heads kv_heads head_dim group; P bias bias_cos "
        "bias_sin turns; I rotated interleaved"
    )


class HrRope(Structure):
    _fields_ = laid(
        "HrKv kv; P qkv; L stride; P q_norm k_norm cos sin; F eps offset; I rotated interleaved "
        "whole values; F growth; I every behind first"
    )


class HrAttention(Structure):
    _fields_ = laid(
        "HrKv kv; P q; L stride; P y; L y_stride; HrQuantised out; P sinks; F scale softcap; I "
        "rows chunked coarse unused"
    )


class HrBidirectional(Structure):
    _fields_ = laid("P qkv; L stride; P y; L y_stride; F scale; I heads head_dim unused")


class HrGateUp(Structure):
    _fields_ = laid("HrQuantised x; HrPart gate up; HrQuantised q; I activation rows")


class HrRoute(Structure):
    _fields_ = laid(
        "P logits; L logits_stride; P bias gains chosen; L chosen_stride; P shares; L "
        "shares_stride; F scale; I experts active scores normalise groups active_groups rows best "
        "unused"
    )


class HrSpan(Structure):
    _fields_ = laid("I expert first count")


class HrExperts(Structure):
    _fields_ = laid(
        "HrQuantised x; P dense; L dense_stride; P chosen; L chosen_stride; P shares; L "
        "shares_stride; P matrices up_bias down_bias; HrQuantised placed; P placed_dense; L "
        "placed_stride; HrQuantised inner; P inner_dense; L inner_stride; P y; L y_stride; P "
        "spans row_of share_of deal; I experts active in_ inner_size out activation rows inside"
    )


class HrRecord(Structure):
    _fields_ = laid("I code unused; P op")


class HrGroup(Structure):
    _fields_ = laid("P tables slots; L table_stride window")


class HrStep(Structure):
    _fields_ = laid(
        "I n b r group_count; P tokens positions query_starts lengths sample_rows; HrGroup*16 "
        "groups; P adapters types states"
    )


class HrLoraPart(Structure):
    _fields_ = laid("P up; I out first")


class HrLora(Structure):
    _fields_ = laid(
        "P x; L x_stride; P inner; L inner_stride; P y; L y_stride; P down ranks parts; I count "
        "room; L in_; I rows unused"
    )


class HrDrawRow(Structure):
    _fields_ = laid("F temperature min_p top_p; I top_k; D uniform")


class HrDraw(Structure):
    _fields_ = laid("P logits; L stride; P rows tokens; L vocab count")


class HrBest(Structure):
    _fields_ = laid("F value; I token")


class HrWorth(Structure):
    _fields_ = laid("L panels skip wait with_ without left; L*2 unused")


class HrHead(Structure):
    _fields_ = laid(
        "HrLinear linear; P best; L stride; P tokens bounds lower worth; L bounded; P found; L "
        "first; P lowest; I ranks rank"
    )


class HrRule(Structure):
    _fields_ = laid("F temperature min_p top_p; I top_k; U stream")


class HrSample(Structure):
    _fields_ = laid("P logits; L stride; P rules tokens; L vocab")


_MIRRORED = """
HrUnit HrSix HrQuantised HrPart HrLinear HrEmbed HrNorm HrQuantise HrGated HrRowsOp HrKv HrRope
HrAttention HrGateUp HrRecord HrGroup HrStep HrLoraPart HrLora HrDrawRow HrDraw HrBest HrWorth
HrHead HrRule HrSample HrLayerNorm HrBidirectional HrRoute HrSpan HrExperts HrHeads HrColumns
HrScatter
"""
MIRRORED: list[type[Structure]] = [globals()[name] for name in _MIRRORED.split()]
"""In the order of `hr_sizeof`; `state_records` has the rest."""


STRUCTS: dict[int, type[Structure]] = {
    EMBED: HrEmbed, NORM: HrNorm, QUANTISE: HrQuantise, LINEAR: HrLinear, ROPE: HrRope,
    ATTENTION: HrAttention, GATED: HrGated, SELECT: HrRowsOp, ADD: HrRowsOp, SOFTCAP: HrRowsOp,
    GATE_UP: HrGateUp, LAYER_NORM: HrLayerNorm, ACTIVATE: HrGated, BIDIRECTIONAL: HrBidirectional,
    ROUTE: HrRoute, PLACE: HrExperts, EXPERTS_UP: HrExperts, EXPERTS_DOWN: HrExperts,
    SCALE: HrRowsOp, LORA_DOWN: HrLora, LORA_UP: HrLora, DRAW: HrDraw, BEST: HrHead, PICK: HrHead,
    SAMPLE: HrSample, BOUND: HrHead, HEADS: HrHeads, COLUMNS: HrColumns, LOWER: HrHead,
    EXPERTS_SUM: HrExperts, SCATTER: HrScatter,
}  # fmt: skip
"""Struct of each record, which the library casts to; `state_records` and `rank_records` add
theirs."""


def address(structure: Any) -> int:
    return ctypes.addressof(structure)
