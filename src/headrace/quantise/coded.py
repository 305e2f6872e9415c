"""The formats of compressed-tensors as grids, and their arrays: the inverse of `quant.checkpoint`.

Integers by output row or by group of a row, with or without a zero point; fp8 (e4m3) by tensor,
output row or block of 128 x 128. Scales are rounded here to the type that the file stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..kernels.cpu.encode import encoder
from ..kernels.weights import FP8_BLOCK
from ..quant.schemes import NVFP4_FORMAT, NVFP4_GROUP
from . import search
from .blocks import Fitted, fp4, fp4_codes, integers
from .solve import Floats, Grid

Host = npt.NDArray[Any]
FP8_MOST = 448.0
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of a group's range that its codes may span: what lies outside is clipped."""


@dataclass(frozen=True, slots=True)
class Coding:
    """Storage of a checkpoint's matrices, as `config_groups` names it."""

    kind: Literal["int", "float"]
    bits: int
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"]
    group: int | None = None
    symmetric: bool = True
    dynamic: str | None = None
    """Strategy of activations that are quantised as they come; None: they are not."""

    @property
    def format(self) -> str:
        """Return the name of `quantization_config.format`."""
        if self.kind == "float":
            return "float-quantized" if self.bits == 8 else NVFP4_FORMAT
        return "int-quantized" if self.bits == 8 else "pack-quantized"

    @property
    def folds(self) -> bool:
        """Whether factors on input channels are worth their search."""
        return self.kind == "int" and (self.bits == 4 or self.dynamic is not None)

    def config(self) -> dict[str, Any]:
        """Return the group of `config_groups`."""
        weights: dict[str, Any] = {
            "num_bits": self.bits, "type": self.kind, "symmetric": self.symmetric,
            "dynamic": False, "strategy": self.strategy, "group_size": self.group,
        }  # fmt: skip
        if self.strategy == "block":
            weights["block_structure"] = [FP8_BLOCK, FP8_BLOCK]
        found: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
        if self.dynamic is not None:
            found["input_activations"] = {
                "num_bits": self.bits, "type": self.kind, "symmetric": True, "dynamic": True,
                "strategy": self.dynamic,
                "group_size": FP8_BLOCK if self.dynamic == "group" else None,
            }  # fmt: skip
        return found

    def parts(self, out: int, width: int, dtype: str) -> list[tuple[str, str, list[int]]]:
        """Return (suffix, type, shape) of each array that a matrix becomes, in their order."""
        scales = {
            "tensor": [1],
            "channel": [out, 1],
            "group": [out, width // (self.group or width)],
            "tensor_group": [out, width // NVFP4_GROUP],
            "block": [-(-out // FP8_BLOCK), -(-width // FP8_BLOCK)],
        }[self.strategy]
        if self.strategy == "tensor_group":
            return [
                ("weight_packed", "U8", [out, width // 2]),
                ("weight_scale", "F8_E4M3", scales),
                ("weight_global_scale", "F32", [1]),
            ]
        if self.kind == "float":
            return [("weight", "F8_E4M3", [out, width]), ("weight_scale", dtype, scales)]
        if self.bits == 8:
            return [("weight", "I8", [out, width]), ("weight_scale", dtype, scales)]
        found = [("weight_packed", "I32", [out, width // 8]), ("weight_scale", dtype, scales)]
        if not self.symmetric:
            found.append(("weight_zero_point", "I32", [out // 8, scales[1]]))
        return [*found, ("weight_shape", "I64", [2])]

    def fitted(self, w: Floats, gram: Floats | None, dtype: str, top: float) -> Fitted:
        """Fit scales to weights [rows, in] and G; the result stores arrays by suffix. `top`: the
        tensor's largest magnitude."""
        if self.strategy == "group":
            return self._grouped(w, gram, dtype)
        if self.strategy == "tensor_group":
            return _nvfp4(w, gram, top)
        rows, width = w.shape
        most = FP8_MOST if self.kind == "float" else 127.0
        nearest = fp8 if self.kind == "float" else integers(-128, 127)
        if self.strategy == "block":
            stored, scale = stored_as(_block_tops(w) / np.float32(most), dtype)
            each = np.repeat(scale, FP8_BLOCK, 0)[:rows].T
            grid = Grid(FP8_BLOCK, np.ascontiguousarray(each), None, nearest)
            return Fitted(grid, lambda grid: {"weight_scale": stored})
        tops: Floats = np.abs(w).max(axis=1)
        if self.strategy == "tensor":
            tops = np.full(rows, top, np.float32)
        stored, scale = stored_as(tops / np.float32(most), dtype)
        kept = stored[:1] if self.strategy == "tensor" else stored
        grid = Grid(width, scale[None], None, nearest)
        return Fitted(grid, lambda grid: {"weight_scale": kept})

    def _grouped(self, w: Floats, gram: Floats | None, dtype: str) -> Fitted:
        rows, width = w.shape
        size = self.group or width
        grouped = np.ascontiguousarray(w.reshape(rows, -1, size).transpose(1, 0, 2))
        if gram is None:
            blocks = np.broadcast_to(np.eye(size, dtype=np.float32), (width // size, size, size))
        else:
            blocks = search.blocks_of(gram, size)
        if not self.symmetric:
            stored, scale, zeros = _with_zeros(grouped, blocks, dtype)
            arrays = {
                "weight_scale": np.ascontiguousarray(stored.T),
                "weight_zero_point": pack_nibbles(zeros.astype(np.uint8)).T,
            }
            grid = Grid(size, scale, -zeros * scale, integers(0, 15))
            return Fitted(grid, lambda grid: arrays)
        nearest = integers(-8, 7)
        if gram is None:
            found = encoder().symmetric(w.reshape(-1, size), 8).reshape(rows, -1).T
        else:
            found = search.symmetric(grouped, blocks, 8, nearest)

        def allowed(group: int, wished: Floats, offset: bool) -> Floats:
            return stored_as(wished, dtype)[1]

        def arrays_of(grid: Grid) -> Mapping[str, Host]:
            return {"weight_scale": np.ascontiguousarray(stored_as(grid.scale, dtype)[0].T)}

        grid = Grid(size, stored_as(found, dtype)[1], None, nearest, allowed)
        return Fitted(grid, arrays_of)

    def groups(self, width: int) -> int:
        """Return the number of scales of a row."""
        size = FP8_BLOCK if self.strategy == "block" else self.group or width
        return -(-width // size)

    def given(
        self, scale: Floats, zeros: Floats | None, dtype: str, top: float, width: int
    ) -> Fitted:
        """Return a grid of rows of `width` with the storable numbers next to scales and zero points
        [groups, rows]; `top`: the tensor's largest scale."""
        if self.strategy == "tensor_group":
            return _of_sixteen(
                np.abs(scale), np.float32(2.0 ** np.floor(np.log2(FP8_MOST / (2 * top))))
            )
        if self.strategy == "tensor":
            scale = np.full_like(scale, top)
        stored, scale = stored_as(scale, dtype)
        size = FP8_BLOCK if self.strategy == "block" else width // len(scale)
        nearest = fp8 if self.kind == "float" else integers(-128, 127)
        zero: Floats | None = None
        found = {"weight_scale": np.ascontiguousarray(stored.T)}
        if self.strategy == "tensor":
            found = {"weight_scale": stored[0, :1]}
        elif self.strategy == "block":
            found = {"weight_scale": np.ascontiguousarray(stored[:, ::FP8_BLOCK].T)}
        elif self.strategy == "group":
            nearest = integers(-8, 7)
        if not self.symmetric:
            zero = np.full_like(scale, 8) if zeros is None else np.clip(np.rint(zeros), 0, 15)
            found["weight_zero_point"] = pack_nibbles(zero.astype(np.uint8)).T
            nearest = integers(0, 15)
        return Fitted(
            Grid(size, scale, None if zero is None else -zero * scale, nearest), lambda grid: found
        )

    def packed(self, codes: Floats) -> Host:
        """Return the array of codes [rows, in] as it is stored."""
        if self.strategy == "tensor_group":
            pairs = fp4_codes(codes).reshape(len(codes), -1, 2)
            return pairs[:, :, 0] | pairs[:, :, 1] << 4
        if self.kind == "float":
            return fp8_codes(codes)
        if self.bits == 8:
            return codes.astype(np.int8)
        return pack_nibbles((codes + 8 * self.symmetric).astype(np.uint8))


def stored_as(scales: Floats, dtype: str) -> tuple[Host, Floats]:
    """Return (the scales as stored in this type, their values)."""
    scales = np.ascontiguousarray(scales, np.float32)
    if dtype == "BF16":
        bits = scales.view(np.uint32)
        stored = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        return stored, (stored.astype(np.uint32) << 16).view(np.float32)
    stored = scales.astype("<f4" if dtype == "F32" else "<f2")
    return stored, stored.astype(np.float32)


def pack_nibbles(codes: npt.NDArray[np.uint8]) -> Host:
    """Return int32 words [rows, values / 8] of codes [rows, values], low bits first."""
    pairs = codes.reshape(len(codes), -1, 2)
    return np.ascontiguousarray(pairs[:, :, 0] | pairs[:, :, 1] << 4).view("<i4")


def fp8(scaled: Floats) -> Floats:
    """Round to e4m3, of two the even code; beyond 448 to that."""
    size = np.minimum(np.abs(scaled), np.float32(FP8_MOST))
    step = np.ldexp(np.float32(1), np.maximum(np.frexp(size)[1] - 1, -6) - 3)
    found: Floats = np.minimum(np.rint(size / step) * step, np.float32(FP8_MOST))
    return np.copysign(found, scaled).astype(np.float32)


def fp8_codes(values: Floats) -> npt.NDArray[np.uint8]:
    """Return the bytes of e4m3 numbers."""
    size = np.abs(values)
    exponent = np.maximum(np.frexp(size)[1] - 1, -6)
    eighths = np.ldexp(size, 3 - exponent).astype(np.int32)
    biased = np.where(eighths >= 8, exponent + 7, 0)
    found: npt.NDArray[np.uint8] = (biased << 3 | eighths & 7).astype(np.uint8)
    found |= np.signbit(values).astype(np.uint8) << 7
    return found


def _nvfp4(w: Floats, gram: Floats | None, top: float) -> Fitted:
    """Fit scales in e4m3 next to the one that makes a group's largest weight 6. The divisor of all
    is a power of two by which that of the matrix's largest weight, `top`, stays in e4m3."""
    grouped = np.ascontiguousarray(w.reshape(len(w), -1, NVFP4_GROUP).transpose(1, 0, 2))
    if gram is None:
        eye = np.eye(NVFP4_GROUP, dtype=np.float32)
        blocks: Floats = np.broadcast_to(eye, (len(grouped), *eye.shape))
    else:
        blocks = search.blocks_of(gram, NVFP4_GROUP)
    # A power of two: every reader then computes the same numbers, whatever it divides first.
    divisor = np.float32(2.0 ** np.floor(np.log2(FP8_MOST * 6 / top)) if top > 0 else 1)
    base: Floats = np.abs(grouped).max(-1) * divisor
    candidates = np.stack([fp8(base / np.float32(last)) for last in (6, 5.5, 6.5, 7, 5, 4, 8)])

    return _of_sixteen(search.among(grouped, blocks, candidates / divisor, fp4), divisor)


def _of_sixteen(scale: Floats, divisor: np.float32) -> Fitted:
    """Return NVFP4's grid with the scales [groups, rows] next to these that e4m3 has."""

    def allowed(group: int, wished: Floats, offset: bool) -> Floats:
        found: Floats = np.maximum(fp8(wished * divisor), 0)
        return found / divisor

    def stored(grid: Grid) -> Mapping[str, Host]:
        scales = fp8_codes(fp8(grid.scale * divisor))
        return {
            "weight_scale": np.ascontiguousarray(scales.T),
            "weight_global_scale": np.array([divisor], np.float32),
        }

    return Fitted(Grid(NVFP4_GROUP, allowed(0, scale, False), None, fp4, allowed), stored)


def _block_tops(w: Floats) -> Floats:
    """Return the largest magnitude of each block of 128 x 128."""
    rows = [np.abs(w[at : at + FP8_BLOCK]).max(axis=0) for at in range(0, len(w), FP8_BLOCK)]
    columns = range(0, w.shape[1], FP8_BLOCK)
    return np.stack([[row[at : at + FP8_BLOCK].max() for at in columns] for row in rows])


def _with_zeros(w: Floats, blocks: Floats, dtype: str) -> tuple[Host, Floats, Floats]:
    """Return scales as stored, their values and zero points, all [groups, rows]: the clipped range
    that loses least."""
    low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
    best = np.full(low.shape, np.inf, np.float32)
    scale, zeros = np.zeros_like(low), np.zeros_like(low)
    for share in _SHRINK:
        _, one = stored_as((high - low) * np.float32(share / 15), dtype)
        inverse = np.divide(1, one, out=np.zeros_like(one), where=one > 0)
        zero = np.clip(np.rint(-low * np.float32(share) * inverse), 0, 15).astype(np.float32)
        for rows in search.pieces(*w.shape):
            codes = np.rint(w[:, rows] * inverse[:, rows, None]) + zero[:, rows, None]
            off = np.clip(codes, 0, 15) - zero[:, rows, None]
            off = off * one[:, rows, None] - w[:, rows]
            error = ((off @ blocks) * off).sum(-1)
            better = error < best[:, rows]
            best[:, rows] = np.where(better, error, best[:, rows])
            scale[:, rows] = np.where(better, one[:, rows], scale[:, rows])
            zeros[:, rows] = np.where(better, zero[:, rows], zeros[:, rows])
    return stored_as(scale, dtype)[0], scale, zeros
