"""Quantised matrices of safetensors checkpoints, as panels that hold them exactly.

    matrix                                            panels   bits a weight
    4 bits, zero 8, scales of fp16                    Q4_0              4.5
    4 bits in groups of 128 (or of rows of those)     INT4           4.3125
    4 bits, other groups of 32, scales of fp16        Q5_0              5.5   code - zero + 16
    8 bits, zero 128, scales of fp16                  Q8_0              8.5
    8 bits, zero 128, groups of 128                   INT8             8.25
    NVFP4, of rows of whole blocks of 64              NVFP4           4.625
    fp8, a scale for the tensor, a row or a block     E4M3             8.25
    others, and tables that are read row by row       F32                32

The first kind that can hold a matrix's contents is used: bf16 scales are mostly exact in fp16, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..arrays import Array
from ..checkpoint_values import block_scales, e4m3, values
from ..weights import (
    FP8_BLOCK,
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    LateWeight,
    PackedWeight,
    Weight,
)

Host = npt.NDArray[np.uint8]
UNIT = 32
BLOCK = 64
"""NVFP4 rows must be multiples of this number of inputs (csrc/layout.h)."""
_HALVES = np.zeros(32, np.uint8)
"""Four-bit code of twice its number, plus 16."""
for _code, _twice in enumerate((0, 1, 2, 3, 4, 6, 8, 12)):
    _HALVES[[16 - _twice, 16 + _twice]] = _code | 8, _code
EXACT = "Q4_0", "Q5_0", "Q8_0", "INT4", "INT8", "NVFP4", "E4M3", "F32", "MXFP4"
"""Kinds of panels for quantised checkpoint matrices."""


@dataclass(slots=True)
class CodedWeight:
    """Codes [out, in], one per byte in `kind`'s encoding, with scales and zeros [out, in / group].
    NVFP4 has one scale [1], and E4M3 bytes in place of zeros."""

    kind: str
    data: Host
    scales: Array
    zeros: Host | None
    group: int
    order: npt.NDArray[np.int32] | None
    name: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    def first(self, rows: int) -> CodedWeight:
        """Return its first rows."""
        zeros = None if self.zeros is None else self.zeros[:rows]
        return replace(self, data=self.data[:rows], scales=self.scales[:rows], zeros=zeros)


@dataclass(slots=True)
class KeptWeight:
    """Weight whose panels are kept: it is read only to check the first of its kind, or if they are
    damaged."""

    kind: str
    name: str
    shape: tuple[int, int]
    order: npt.NDArray[np.int32] | None
    read: Callable[[], CodedWeight | BlockWeight | DenseWeight]

    def first(self, rows: int) -> CodedWeight | BlockWeight | DenseWeight:
        """Return its first rows."""
        made = self.read()
        if isinstance(made, CodedWeight):
            return made.first(rows)
        if isinstance(made, BlockWeight):
            return BlockWeight(made.kind, made.data[:rows], (rows, made.shape[1]))
        return DenseWeight(made.data[:rows])


def coded(
    weight: PackedWeight | Fp8Weight | BlockWeight, *, ordered: bool
) -> CodedWeight | DenseWeight | BlockWeight:
    """Convert the weight to the kind of panels that holds it exactly; `ordered`: its inputs may be
    permuted."""
    if isinstance(weight, BlockWeight):
        return weight
    if isinstance(weight, Fp8Weight):
        scales = np.ascontiguousarray(block_scales(weight))
        return CodedWeight("E4M3", weight.data, scales, None, FP8_BLOCK, None, weight.name)
    kind = None if weight.order is not None and not ordered else _kind(weight)
    if kind is None:
        return DenseWeight(values(weight), weight.name)
    codes, scales, zeros = weight.codes, weight.scales, None
    if kind == "NVFP4":
        assert weight.unit is not None
        codes, zeros = _HALVES[codes], _e4m3_bytes(scales / np.float32(weight.unit))
        scales = np.array([256 * weight.unit], np.float32)
    if kind in ("Q4_0", "Q5_0", "Q8_0"):
        scales = scales.astype(np.float16)
    if kind == "INT4":
        zeros = _zeros(weight).astype(np.uint8)
    if kind == "Q5_0":
        codes = codes + np.repeat((16 - _zeros(weight)).astype(np.uint8), weight.group, 1)
    return CodedWeight(kind, codes, scales, zeros, weight.group, weight.order, weight.name)


def one_order(parts: Sequence[Weight]) -> bool:
    """Return whether all parts in codes have their inputs in the same order."""
    orders = [part.order for part in parts if isinstance(part, PackedWeight | LateWeight)]
    return all(_same(order, orders[0]) for order in orders)


def _same(one: Array | None, other: Array | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _kind(weight: PackedWeight) -> str | None:
    """Return the first kind that holds it exactly; None: only fp32 does."""
    if weight.unit is not None and weight.shape[1] % BLOCK == 0:
        return "NVFP4"
    middle = 1 << (weight.bits - 1)
    zeros, scales = _zeros(weight), weight.scales
    offsets = np.zeros_like(scales) if weight.offsets is None else weight.offsets
    if weight.group % UNIT or weight.bits not in (4, 8) or (zeros * scales != -offsets).any():
        return None
    symmetric = bool((offsets == -middle * scales).all())
    with np.errstate(over="ignore"):
        half = bool((scales.astype(np.float16).astype(np.float32) == scales).all())
    if symmetric and half:
        return "Q4_0" if weight.bits == 4 else "Q8_0"
    if weight.bits == 4 and zeros.min() >= 0 and zeros.max() <= 16:
        return "INT4" if weight.group == 128 else "Q5_0" if half else None
    return "INT8" if symmetric and weight.group == 128 else None


def _e4m3_bytes(numbers: npt.NDArray[np.float32]) -> Host:
    """Return the E4M3 bytes nearest to finite numbers."""
    known = e4m3()[:127]
    size: Host = np.searchsorted((known[1:] + known[:-1]) / 2, np.abs(numbers)).astype(np.uint8)
    sign: Host = np.where(np.signbit(numbers), 128, 0).astype(np.uint8)
    return size | sign


def _zeros(weight: PackedWeight) -> npt.NDArray[np.float32]:
    """Return the zero of each group, in codes; the middle code for a group whose scale is zero."""
    middle = np.full_like(weight.scales, 1 << (weight.bits - 1))
    if weight.offsets is None:
        return np.zeros_like(middle)
    found: npt.NDArray[np.float32] = np.rint(
        np.divide(-weight.offsets, weight.scales, out=middle, where=weight.scales != 0)
    )
    return found
