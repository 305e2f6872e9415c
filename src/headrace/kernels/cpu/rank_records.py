"""Mirror of the structs by which ranks meet (csrc/records.h), and all mirrors together."""

from __future__ import annotations

from ctypes import Structure

from . import state_records
from .records import AGREE, EXCHANGE, HANDOVER, STRUCTS, laid


class HrPiece(Structure):
    _fields_ = laid("P data; L stride; P bounds spans owners; I rows together")


class HrExchange(Structure):
    _fields_ = laid("P fence pieces; I ranks place count unused")


class HrHandover(Structure):
    _fields_ = laid("P fence link data; L stride; I width peer gives most")


class HrAgree(Structure):
    _fields_ = laid("P best; L stride; P tokens; I ranks unused")


class HrDeal(Structure):
    _fields_ = laid("P owners went own values; L stride; I rank unused")


STRUCTS |= {EXCHANGE: HrExchange, HANDOVER: HrHandover, AGREE: HrAgree}
MIRRORED: list[type[Structure]] = [
    *state_records.MIRRORED, HrPiece, HrExchange, HrHandover, HrAgree, HrDeal,
]  # fmt: skip
"""All structs, in the order of `hr_sizeof`."""
