"""Weight layouts that operators take. `quant` makes them, `kernels` reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .arrays import Array, joined

if TYPE_CHECKING:
    import torch

PLANES = "Q8_0_PLANES"
"""Kind of Q8_0 with its three low bits apart, for a head (csrc/bound.h)."""
OUTPUTS = 16
"""Outputs in a panel (csrc/layout.h)."""
UNIT_BYTES, LOW_BYTES = 544, 192
"""Bytes of 16 outputs by 32 inputs in `PLANES`, and of the low plane among them."""


@dataclass(slots=True)
class DenseWeight:
    """`data[out, in]` in fp32, bf16 or fp16: y = x · dataᵀ."""

    data: Array
    name: str = ""
    """Name of the weight in the model; empty for one that was computed."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)

    def rows(self, first: int, count: int) -> DenseWeight:
        """Return `count` outputs from `first` on: a view."""
        return DenseWeight(self.data[first : first + count])


@dataclass(slots=True)
class BlockWeight:
    """A GGUF tensor as stored in the file: `data[out, bytes_per_row]` uint8, `kind` its type.

    The format's own blocks, unchanged and mapped: the form in which every quantised weight of a
    file is loaded. Kernels repack it; the reference dequantises it.
    """

    kind: str
    """ggml type name: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, IQ4_NL …"""
    data: Array
    shape: tuple[int, int]
    name: str = ""
    """Name of the weight in the model; empty for one that was computed."""

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


@dataclass(slots=True)
class PackedWeight:
    """Headrace's one family of quantised layouts (DESIGN "Numbers").

    w[o, i] = codes[o, i] · scales[o, i // group] + offsets[o, i // group]; codes are unsigned and
    `bits` wide, stored in the form that this width's kernel takes (`layout` names it; "rows" is the
    plain one: uint8[out, in] with one code per byte).
    """

    codes: Array
    scales: Array
    offsets: Array | None
    bits: int
    group: int
    shape: tuple[int, int]
    layout: str = "rows"
    order: Array | None = None
    """int32 [in]: input of each column of the codes; None: they are in order."""
    unit: float | None = None
    """NVFP4: scales are numbers of E4M3 times this, up to the rounding of fp32, and codes are twice
    a number of four bits (E2M1), plus 16; None: another format."""
    name: str = ""
    """Name of the weight in the model; empty for one that was computed."""

    @property
    def nbytes(self) -> int:
        extra = 0 if self.offsets is None else self.offsets.nbytes
        return int(self.codes.nbytes + self.scales.nbytes + extra)


FP8_BLOCK = 128
"""Side of a block of fp8 that shares a scale."""


@dataclass(slots=True)
class Fp8Weight:
    """`data[out, in]` in float8_e4m3fn, in the host's arrays its bytes; w = data · scale of the
    output row, or of the block.

    `scales` fp32: [1, 1] for the tensor, [out, 1] by output row, or [ceil(out / 128),
    ceil(in / 128)] by block. Kernels want the second or the third: see `per_row`.
    """

    data: Array
    scales: Array
    name: str = ""
    """Name of the weight in the model."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes + self.scales.nbytes)

    @property
    def blocked(self) -> bool:
        """Whether there is one scale per block of 128 x 128."""
        out, width = self.shape
        if self.scales.shape in ((1, 1), (out, 1)):
            return False
        assert self.scales.shape == (-(-out // 128), -(-width // 128)), "not a layout of scales"
        return True

    def per_row(self) -> Fp8Weight:
        """Repeat a scale per tensor for every row; other scales stay as they are."""
        if self.scales.shape != (1, 1):
            return self
        return Fp8Weight(self.data, self.scales.expand(self.shape[0], 1).contiguous())

    def values(self) -> torch.Tensor:
        """Return the values, [out, in] fp32."""
        scales = self.scales
        if self.blocked:
            out, width = self.shape
            scales = scales.repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :width]
        found: torch.Tensor = self.data.float() * scales
        return found


@dataclass(slots=True)
class LateWeight:
    """Matrix of a checkpoint that is read on demand: not if its panels are kept."""

    name: str
    shape: tuple[int, int]
    order: Array | None
    """int32 [in], see `PackedWeight.order`."""
    read: Callable[[], PackedWeight | Fp8Weight | BlockWeight]
    """Reader of the matrix. Raises `ModelFileError`."""
    nbytes = 0


@dataclass(slots=True)
class PanelWeight:
    """A weight in the CPU kernels' panels of 16 outputs: opaque bytes, `cpu/csrc/layout.h`.

    `kind` is the ggml type it came from, whose scales it keeps bit for bit, or F32, F16, BF16; of a
    head of Q8_0 it is Q8_0_PLANES; INT4, INT8, NVFP4 and E4M3 are of safetensors (`cpu/coded.py`).
    """

    kind: str
    data: npt.NDArray[np.uint8]
    """uint8, aligned to 64 bytes."""
    shape: tuple[int, int]
    order: npt.NDArray[np.int32] | None = None
    """[in]: input that each of its columns is multiplied with; None: in order."""
    low: npt.NDArray[np.uint8] | None = None
    """Plane of low bits of a rank's rows; None: it follows the other one in `data`."""

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.low is None else self.low.nbytes)

    @property
    def low_bytes(self) -> int:
        """Bytes of its plane of low bits, of which a greedy step of few rows reads very few."""
        return self.nbytes // UNIT_BYTES * LOW_BYTES if self.kind == PLANES else 0

    def rows(self, first: int, count: int) -> PanelWeight:
        """Return `count` outputs from `first` on: a view of whole panels, except for the last."""
        out, width = self.shape
        assert first % OUTPUTS == 0
        assert count % OUTPUTS == 0 or first + count == out, "a panel belongs to one rank"
        panels, begin, end = -(-out // OUTPUTS), first // OUTPUTS, -(-(first + count) // OUTPUTS)
        high, low = self.nbytes - self.low_bytes, None
        if high < self.nbytes:
            each = self.low_bytes // panels
            low = self.data[high + begin * each : high + end * each]
        each = high // panels
        data = self.data[begin * each : end * each]
        return PanelWeight(self.kind, data, (count, width), self.order, low)


@dataclass(slots=True)
class TiledWeight:
    """A packed weight in the form of the GPU kernels: `triton/packed.py` shows the layout."""

    codes: torch.Tensor
    """uint8 [chunks, out, bytes]."""
    pairs: torch.Tensor
    """int32 [chunks, planes, out]: two halves each, scales with their offsets or two scales."""
    factors: torch.Tensor
    """fp32 [out]: powers of two that scales and offsets are multiplied with."""
    zero: int | None
    """The code that means 0 in all groups; None: groups have offsets."""
    bits: int
    """Width of a code, or `triton.unpack.E2M1`."""
    group: int
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.pairs.nbytes + self.factors.nbytes


@dataclass(slots=True)
class StackedWeight:
    """Rows of several weights stacked (q, k and v; gate and up), each unchanged."""

    parts: tuple[Matrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Matrix = (
    DenseWeight | BlockWeight | PackedWeight | Fp8Weight | LateWeight | PanelWeight | TiledWeight
)
Weight = Matrix | StackedWeight


def cut_weight(
    weight: Weight, cut: tuple[tuple[int, int, int], ...], rows: tuple[int, ...]
) -> Weight:
    """Return the rows of `WeightRef.cut`, () for all, of a weight made from tensors with these
    `rows`."""
    if not cut:
        return weight
    taken = []
    for which, first, count in cut:
        if isinstance(weight, StackedWeight):
            part, begin = weight.parts[which], 0
        else:
            part, begin = weight, sum(rows[:which])  # One matrix of all tensors.
        assert isinstance(part, PanelWeight | DenseWeight), "no other forms are cut"
        taken.append(part.rows(begin + first, count))
    if len(taken) == 1:
        return taken[0]
    dense = [part.data for part in taken if isinstance(part, DenseWeight)]
    return DenseWeight(joined(dense, 0)) if dense else StackedWeight(tuple(taken))


@dataclass(slots=True)
class LoraWeight:
    """All slots' additions to one weight, which may be a stack of `parts` matrices (q, k and v).

    Adapters of a lower rank than R are padded with zeros.
    """

    down: torch.Tensor
    """[slots, parts · R, in]: A of every part, one below the other."""
    up: tuple[torch.Tensor, ...]
    """Per part [slots, R, out of the part]: B transposed, with the scale in it."""
    ranks: npt.NDArray[np.int32]
    """[slots]: the rank of each slot's adapter here, at most R; 0: it adds nothing."""

    @property
    def room(self) -> int:
        """R, the largest rank."""
        return self.up[0].shape[1]

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + sum(part.nbytes for part in self.up)
