"""Mirror of csrc/states.h, field by field."""

from __future__ import annotations

from ctypes import Structure

from . import records
from .records import laid


class HrConv(Structure):
    _fields_ = laid(
        "P x; L x_stride; P taps bias y; L y_stride; P inputs; I channels count room gated silu "
        "group"
    )


class HrRecurrence(Structure):
    _fields_ = laid(
        "P mixed; L mixed_stride; P z; L z_stride; P b; L b_stride; P a; L a_stride; P decay step "
        "skip gain y; L y_stride; P state tail; I key_heads heads key_size value_size drafts "
        "group; F eps; I tiled"
    )


class HrMultiply(Structure):
    _fields_ = laid(
        "P x; L x_stride; P gate; L gate_stride; P y; L y_stride; HrQuantised q; I size "
        "activation rows unused"
    )


records.STRUCTS |= {
    records.CONV: HrConv,
    records.RECURRENCE: HrRecurrence,
    records.MULTIPLY: HrMultiply,
}
MIRRORED: list[type[Structure]] = [*records.MIRRORED, HrConv, HrRecurrence, HrMultiply]
"""Structs up to here, in the order of `hr_sizeof`."""
