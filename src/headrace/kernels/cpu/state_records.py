"""Mirror of csrc/states.h, field by field."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

from . import records
from .records import HrQuantised

_P, _I, _L, _F = c_void_p, c_int32, c_int64, c_float


class HrConv(Structure):
    _fields_ = [
        ("x", _P),
        ("x_stride", _L),
        ("taps", _P),
        ("bias", _P),
        ("y", _P),
        ("y_stride", _L),
        ("inputs", _P),
        ("channels", _I),
        ("count", _I),
        ("room", _I),
        ("gated", _I),
        ("silu", _I),
        ("group", _I),
    ]


class HrRecurrence(Structure):
    _fields_ = [
        ("mixed", _P),
        ("mixed_stride", _L),
        ("z", _P),
        ("z_stride", _L),
        ("b", _P),
        ("b_stride", _L),
        ("a", _P),
        ("a_stride", _L),
        ("decay", _P),
        ("step", _P),
        ("skip", _P),
        ("gain", _P),
        ("y", _P),
        ("y_stride", _L),
        ("state", _P),
        ("tail", _P),
        ("key_heads", _I),
        ("heads", _I),
        ("key_size", _I),
        ("value_size", _I),
        ("drafts", _I),
        ("group", _I),
        ("eps", _F),
        ("tiled", _I),
    ]


class HrMultiply(Structure):
    _fields_ = [
        ("x", _P),
        ("x_stride", _L),
        ("gate", _P),
        ("gate_stride", _L),
        ("y", _P),
        ("y_stride", _L),
        ("q", HrQuantised),
        ("size", _I),
        ("activation", _I),
        ("rows", _I),
        ("unused", _I),
    ]


MIRRORED: list[type[Structure]] = [*records.MIRRORED, HrConv, HrRecurrence, HrMultiply]
"""Structs up to here, in the order of `hr_sizeof`."""
