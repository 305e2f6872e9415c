"""Mirror of csrc/records.h, field by field; `library` checks the sizes when it loads."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

KINDS = {
    "Q4_0": 1,
    "Q4_1": 2,
    "Q5_0": 3,
    "Q5_1": 4,
    "Q8_0": 5,
    "Q4_K": 6,
    "Q5_K": 7,
    "Q6_K": 8,
    "Q8_0_PLANES": 9,
    "MXFP4": 10,
    "INT4": 11,
    "INT8": 12,
    "F32": 16,
    "F16": 17,
    "BF16": 18,
    "E4M3": 21,
}
KV_I8 = 19
"""Kind of a KV cache of int8 codes with scales; no kind of weights."""
KV_K8V4 = 20
"""The same with V in four bits."""
_NAMES = ("silu", "gelu_tanh", "gelu", "tanh", "clamped", "sigmoid", "relu2")
ACTIVATIONS = {name: number for number, name in enumerate(_NAMES)}
VALUES = {name: number for number, name in enumerate(("own", "normed", "keys", "elsewhere"))}
INDICES = {"tokens": 0, "positions": 1, "types": 2}
"""Which of a step's numbers say the rows of a table."""
ACTIVATED = 4
"""HrInto of a product that goes through an activation: this plus the activation's number."""
ROWS_N, ROWS_R = 0, 1
EMBED, NORM, QUANTISE, LINEAR, ROPE, ATTENTION, GATED, SELECT, ADD, SOFTCAP, GATE_UP = range(1, 12)
LAYER_NORM, ACTIVATE, BIDIRECTIONAL, ROUTE, PLACE, EXPERTS_UP, EXPERTS_DOWN, SCALE = range(12, 20)
LORA_DOWN, LORA_UP, DRAW, BEST, PICK, SAMPLE, BOUND, HEADS, COLUMNS = range(20, 29)
CONV, RECURRENCE, MULTIPLY, EXCHANGE, AGREE, LOWER, HANDOVER = range(29, 36)
BOUNDED = 4
"""Rows up to which bounding the logits first is worth it (docs/kernels.md): HR_BOUNDED."""
MAX_GROUPS = 16
SIX = 6
"""Rows of quantised activations that are interleaved."""
UNIT = 32
"""Activations share a scale in groups of this many."""

_P, _I, _L, _F = c_void_p, c_int32, c_int64, c_float


class HrUnit(Structure):
    _fields_ = [
        ("scale", _F),
        ("sum", _F),
        ("low32", _I),
        ("high32", _I),
        ("all16", _I),
        ("all128", _I),
    ]


class HrLane(Structure):
    _fields_ = [("codes", ctypes.c_int8 * UNIT), ("unit", HrUnit), ("unused", _I * 2)]


class HrSix(Structure):
    _fields_ = [("lanes", HrLane * SIX)]


class HrQuantised(Structure):
    _fields_ = [("six", _P), ("stride", _L)]


class HrPart(Structure):
    _fields_ = [
        ("data", _P),
        ("low", _P),
        ("bias", _P),
        ("y", _P),
        ("y_stride", _L),
        ("kind", _I),
        ("out", _I),
        ("in_", _I),
        ("accumulate", _I),
    ]


class HrLinear(Structure):
    _fields_ = [
        ("x", HrQuantised),
        ("dense", _P),
        ("dense_stride", _L),
        ("parts", _P),
        ("count", _I),
        ("rows", _I),
    ]


class HrHeads(Structure):
    _fields_ = [("linear", HrLinear), ("first", _L), ("step", _L)]


class HrColumns(Structure):
    _fields_ = [
        ("x", _P),
        ("x_stride", _L),
        ("y", _P),
        ("y_stride", _L),
        ("x_step", _L),
        ("y_step", _L),
        ("size", _I),
        ("times", _I),
        ("rows", _I),
        ("unused", _I),
    ]


class HrEmbed(Structure):
    _fields_ = [
        ("data", _P),
        ("row_bytes", _L),
        ("y", _P),
        ("y_stride", _L),
        ("scale", _F),
        ("kind", _I),
        ("vocab", _I),
        ("size", _I),
        ("index", _I),
        ("unused", _I),
    ]


class HrNorm(Structure):
    _fields_ = [
        ("x", _P),
        ("x_stride", _L),
        ("residual", _P),
        ("residual_stride", _L),
        ("weight", _P),
        ("y", _P),
        ("y_stride", _L),
        ("q", HrQuantised),
        ("eps", _F),
        ("offset", _F),
        ("size", _I),
        ("rows", _I),
    ]


class HrLayerNorm(Structure):
    _fields_ = [
        ("x", _P),
        ("x_stride", _L),
        ("residual", _P),
        ("residual_stride", _L),
        ("weight", _P),
        ("bias", _P),
        ("y", _P),
        ("y_stride", _L),
        ("q", HrQuantised),
        ("eps", _F),
        ("size", _I),
        ("rows", _I),
        ("unused", _I),
    ]


class HrQuantise(Structure):
    _fields_ = [
        ("x", _P),
        ("x_stride", _L),
        ("q", HrQuantised),
        ("order", _P),
        ("size", _I),
        ("rows", _I),
    ]


class HrGated(Structure):
    _fields_ = [
        ("x", _P),
        ("x_stride", _L),
        ("y", _P),
        ("y_stride", _L),
        ("q", HrQuantised),
        ("size", _I),
        ("activation", _I),
        ("rows", _I),
        ("unused", _I),
    ]


class HrRowsOp(Structure):
    _fields_ = [
        ("x", _P),
        ("x_stride", _L),
        ("y", _P),
        ("y_stride", _L),
        ("size", _I),
        ("rows", _I),
        ("factor", _F),
        ("unused", _I),
    ]


class HrKv(Structure):
    _fields_ = [
        ("k", _P),
        ("v", _P),
        ("k_scale", _P),
        ("v_scale", _P),
        ("kind", _I),
        ("block_size", _I),
        ("heads", _I),
        ("kv_heads", _I),
        ("head_dim", _I),
        ("group", _I),
        ("bias", _P),
        ("bias_cos", _P),
        ("bias_sin", _P),
        ("turns", _P),
        ("rotated", _I),
        ("interleaved", _I),
    ]


class HrRope(Structure):
    _fields_ = [
        ("kv", HrKv),
        ("qkv", _P),
        ("stride", _L),
        ("q_norm", _P),
        ("k_norm", _P),
        ("cos", _P),
        ("sin", _P),
        ("eps", _F),
        ("offset", _F),
        ("rotated", _I),
        ("interleaved", _I),
        ("whole", _I),
        ("values", _I),
        ("growth", _F),
        ("every", _I),
        ("behind", _I),
        ("unused", _I),
    ]


class HrAttention(Structure):
    _fields_ = [
        ("kv", HrKv),
        ("q", _P),
        ("stride", _L),
        ("y", _P),
        ("y_stride", _L),
        ("out", HrQuantised),
        ("sinks", _P),
        ("scale", _F),
        ("softcap", _F),
        ("rows", _I),
        ("chunked", _I),
    ]


class HrBidirectional(Structure):
    _fields_ = [
        ("qkv", _P),
        ("stride", _L),
        ("y", _P),
        ("y_stride", _L),
        ("scale", _F),
        ("heads", _I),
        ("head_dim", _I),
        ("unused", _I),
    ]


class HrGateUp(Structure):
    _fields_ = [
        ("x", HrQuantised),
        ("gate", HrPart),
        ("up", HrPart),
        ("q", HrQuantised),
        ("activation", _I),
        ("rows", _I),
    ]


class HrRoute(Structure):
    _fields_ = [
        ("logits", _P),
        ("logits_stride", _L),
        ("bias", _P),
        ("gains", _P),
        ("chosen", _P),
        ("chosen_stride", _L),
        ("shares", _P),
        ("shares_stride", _L),
        ("scale", _F),
        ("experts", _I),
        ("active", _I),
        ("scores", _I),
        ("normalise", _I),
        ("groups", _I),
        ("active_groups", _I),
        ("rows", _I),
        ("best", _I),
        ("unused", _I),
    ]


class HrSpan(Structure):
    _fields_ = [("expert", _I), ("first", _I), ("count", _I)]


class HrExperts(Structure):
    _fields_ = [
        ("x", HrQuantised),
        ("dense", _P),
        ("dense_stride", _L),
        ("chosen", _P),
        ("chosen_stride", _L),
        ("shares", _P),
        ("shares_stride", _L),
        ("matrices", _P),
        ("up_bias", _P),
        ("down_bias", _P),
        ("placed", HrQuantised),
        ("placed_dense", _P),
        ("placed_stride", _L),
        ("inner", HrQuantised),
        ("inner_dense", _P),
        ("inner_stride", _L),
        ("y", _P),
        ("y_stride", _L),
        ("spans", _P),
        ("row_of", _P),
        ("share_of", _P),
        ("experts", _I),
        ("active", _I),
        ("in_", _I),
        ("inner_size", _I),
        ("out", _I),
        ("activation", _I),
        ("rows", _I),
        ("inside", _I),
    ]


class HrRecord(Structure):
    _fields_ = [("code", _I), ("unused", _I), ("op", _P)]


class HrGroup(Structure):
    _fields_ = [("tables", _P), ("slots", _P), ("table_stride", _L), ("window", _L)]


class HrStep(Structure):
    _fields_ = [
        ("n", _I),
        ("b", _I),
        ("r", _I),
        ("group_count", _I),
        ("tokens", _P),
        ("positions", _P),
        ("query_starts", _P),
        ("lengths", _P),
        ("sample_rows", _P),
        ("groups", HrGroup * MAX_GROUPS),
        ("adapters", _P),
        ("types", _P),
        ("states", _P),
    ]


class HrLoraPart(Structure):
    _fields_ = [("up", _P), ("out", _I), ("first", _I)]


class HrLora(Structure):
    _fields_ = [
        ("x", _P),
        ("x_stride", _L),
        ("inner", _P),
        ("inner_stride", _L),
        ("y", _P),
        ("y_stride", _L),
        ("down", _P),
        ("ranks", _P),
        ("parts", _P),
        ("count", _I),
        ("room", _I),
        ("in_", _L),
        ("rows", _I),
        ("unused", _I),
    ]


class HrDrawRow(Structure):
    _fields_ = [
        ("temperature", _F),
        ("min_p", _F),
        ("top_p", _F),
        ("top_k", _I),
        ("uniform", c_double),
    ]


class HrDraw(Structure):
    _fields_ = [
        ("logits", _P),
        ("stride", _L),
        ("rows", _P),
        ("tokens", _P),
        ("vocab", _L),
        ("count", _L),
    ]


class HrBest(Structure):
    _fields_ = [("value", _F), ("token", _I)]


class HrWorth(Structure):
    _fields_ = [
        ("panels", _L),
        ("skip", _L),
        ("wait", _L),
        ("with_", _L),
        ("without", _L),
        ("left", _L),
        ("unused", _L * 2),
    ]


class HrHead(Structure):
    _fields_ = [
        ("linear", HrLinear),
        ("best", _P),
        ("stride", _L),
        ("tokens", _P),
        ("bounds", _P),
        ("lower", _P),
        ("worth", _P),
        ("bounded", _L),
        ("found", _P),
        ("first", _L),
        ("lowest", _P),
        ("ranks", _I),
        ("rank", _I),
    ]


class HrRule(Structure):
    _fields_ = [
        ("temperature", _F),
        ("min_p", _F),
        ("top_p", _F),
        ("top_k", _I),
        ("stream", c_uint64),
    ]


class HrSample(Structure):
    _fields_ = [("logits", _P), ("stride", _L), ("rules", _P), ("tokens", _P), ("vocab", _L)]


MIRRORED: list[type[Structure]] = [
    HrUnit,
    HrSix,
    HrQuantised,
    HrPart,
    HrLinear,
    HrEmbed,
    HrNorm,
    HrQuantise,
    HrGated,
    HrRowsOp,
    HrKv,
    HrRope,
    HrAttention,
    HrGateUp,
    HrRecord,
    HrGroup,
    HrStep,
    HrLoraPart,
    HrLora,
    HrDrawRow,
    HrDraw,
    HrBest,
    HrWorth,
    HrHead,
    HrRule,
    HrSample,
    HrLayerNorm,
    HrBidirectional,
    HrRoute,
    HrSpan,
    HrExperts,
    HrHeads,
    HrColumns,
]
"""In the order of `hr_sizeof`; `state_records` has the rest."""


def address(structure: Any) -> int:
    return ctypes.addressof(structure)
