"""Records as the library reads them: the structs and numbers of csrc/records.h."""

from __future__ import annotations

from ctypes import Structure
from pathlib import Path

from ...base.c_header import Header

_SOURCES = Path(__file__).parent / "csrc"
HEADER = Header(_SOURCES / "records.h", _SOURCES / "library.h")
KINDS = {name.removeprefix("HR_"): number for name, number in HEADER.enums["HrKind"].items()}
_KV = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "k8v4": "K8V4"}
KV_KINDS = {dtype: KINDS[kind] for dtype, kind in _KV.items()}
"""Kind of a KV cache by its type."""
del KINDS["I8"], KINDS["K8V4"]  # These are no kinds of weights.


def _named(enum: str, prefix: str = "HR_") -> dict[str, int]:
    return {name.removeprefix(prefix).lower(): at for name, at in HEADER.enums[enum].items()}


ACTIVATIONS = _named("HrActivation")
VALUES = _named("HrValues", "HR_VALUES_")
INDICES = _named("HrIndex")
"""Number of each of a step's arrays that can index the rows of a table."""
ACTIVATED = HEADER.enums["HrInto"]["HR_ACTIVATED"]
"""HrInto of a product that goes through an activation: this plus the activation's number."""
ROWS_N, ROWS_R, ROWS_T = HEADER.enums["HrRows"].values()
BOUNDED = HEADER.numbers["HR_BOUNDED"]
"""Most rows for which bounding the logits first pays off (docs/kernels.md)."""
SIX = HEADER.numbers["HR_SIX"]
"""Number of rows of quantised activations that are interleaved."""
UNIT = 32
"""Number of activations that share a scale."""
CODES = {name: code for name, (code, _) in HEADER.codes.items()}


@HEADER.laid
class HrSix(Structure):
    """Six rows of quantised activations, a unit of each."""


@HEADER.laid
class HrQuantised(Structure):
    """Rows of quantised activations."""


@HEADER.laid
class HrPart(Structure):
    """Matrix of a product, and the place of its results."""


@HEADER.laid
class HrLinear(Structure):
    """Product of rows with one or more matrices."""


@HEADER.laid
class HrWorth(Structure):
    """A thread's account of whether bounds of the logits pay off."""


@HEADER.laid
class HrKv(Structure):
    """KV cache of a layer."""


@HEADER.laid
class HrSpan(Structure):
    """Run of rows of one expert."""


@HEADER.laid
class HrDeal(Structure):
    """Experts of a mixture on this rank."""


@HEADER.laid
class HrPiece(Structure):
    """Data of an exchange."""


@HEADER.laid
class HrRecord(Structure):
    """Record of a program: its code, and the address of its struct."""


@HEADER.laid
class HrStep(Structure):
    """Header of a step: everything that changes from step to step."""


STRUCTS = {code: HEADER.struct(name) for code, name in HEADER.codes.values()}
"""Struct of each record, which the library casts to."""
