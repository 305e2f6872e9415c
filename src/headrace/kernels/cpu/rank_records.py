"""Mirror of the structs by which ranks meet (csrc/records.h), and all mirrors together."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

from . import state_records


class HrExchange(Structure):
    _fields_ = [("fence", c_void_p), ("ranks", c_int32), ("place", c_int32)]


class HrAgree(Structure):
    _fields_ = [
        ("best", c_void_p),
        ("stride", c_int64),
        ("tokens", c_void_p),
        ("ranks", c_int32),
        ("unused", c_int32),
    ]


MIRRORED: list[type[Structure]] = [*state_records.MIRRORED, HrExchange, HrAgree]
"""All structs, in the order of `hr_sizeof`."""
