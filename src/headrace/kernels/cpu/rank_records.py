"""Mirror of the structs by which ranks meet (csrc/records.h), and all mirrors together."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

from . import state_records


class HrPiece(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("stride", c_int64),
        ("bounds", c_void_p),
        ("spans", c_void_p),
        ("rows", c_int32),
        ("together", c_int32),
    ]


class HrExchange(Structure):
    _fields_ = [
        ("fence", c_void_p),
        ("pieces", c_void_p),
        ("ranks", c_int32),
        ("place", c_int32),
        ("count", c_int32),
        ("unused", c_int32),
    ]


class HrHandover(Structure):
    _fields_ = [
        ("fence", c_void_p),
        ("link", c_void_p),
        ("data", c_void_p),
        ("stride", c_int64),
        ("width", c_int32),
        ("peer", c_int32),
        ("gives", c_int32),
        ("most", c_int32),
    ]


class HrAgree(Structure):
    _fields_ = [
        ("best", c_void_p),
        ("stride", c_int64),
        ("tokens", c_void_p),
        ("ranks", c_int32),
        ("unused", c_int32),
    ]


MIRRORED: list[type[Structure]] = [
    *state_records.MIRRORED,
    HrPiece,
    HrExchange,
    HrHandover,
    HrAgree,
]
"""All structs, in the order of `hr_sizeof`."""
