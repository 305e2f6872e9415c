"""The conversion of one tensor to another format: its numbers, new codes, and the differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import quant
from ..base.errors import UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..kernels.arrays import floats, host
from ..kernels.checkpoint_values import block_scales, values
from ..kernels.weights import FP8_BLOCK, BlockWeight, Fp8Weight
from ..loader.quantised_safetensors import picked
from ..loader.safetensors_file import SIZES
from ..loader.weight_source import read_weight
from ..loader.weights import load_weights
from ..quant.ggml_types import BY_NAME, DENSE
from ..quantise.blocks import FORMATS, Fitted
from ..quantise.coded import Coding, stored_as
from ..quantise.exact import OnGrid, exact
from ..quantise.solve import Floats
from . import to_compressed

ROWS = 1 << 22
"""Numbers converted at once."""
Host = npt.NDArray[Any]
_MOST = {"F32": 2.0**128 - 2.0**104, "F16": 65504.0, "BF16": 2.0**128 - 2.0**120}
"""Largest numbers of the dense types."""


@dataclass(slots=True)
class Move:
    """One tensor of the result."""

    name: str
    shape: tuple[int, ...]
    was: str
    """Its type in the model: of GGUF or safetensors, or a name for codes."""
    kind: str
    """Its new type: F32, F16, BF16, a type of GGUF, or the coding's format; `was` if it stays."""
    read: Callable[[], Any]
    """Reader of the weight as loaded."""
    coding: Coding | None = None
    offset: float = 0.0
    """Number that the file adds to each element and its reader subtracts."""
    changed: int = 0
    """Number of elements that change."""
    error: float = 0.0
    """Their squared error over the sum of all squares."""
    total: float = 0.0

    @property
    def stays(self) -> bool:
        return self.kind == self.was and self.coding is None and not self.offset

    @property
    def size(self) -> int:
        """Bytes of the result."""
        if self.coding is None and self.kind not in SIZES:
            return int(np.prod(self.shape[:-1])) * BY_NAME[self.kind].row_bytes(self.shape[-1])
        return sum(int(np.prod(shape)) * SIZES[dtype] for _, dtype, shape in self.parts)

    @property
    def parts(self) -> list[to_compressed.Part]:
        """Arrays of a shard that it becomes."""
        if self.coding is None:
            return [(self.name, self.kind, list(self.shape))]
        module = self.name.removesuffix("weight")
        found = self.coding.parts(self.shape[0], self.shape[1], "F32")
        return [(module + suffix, dtype, shape) for suffix, dtype, shape in found]

    def data(self) -> list[Host]:
        """Return its bytes in order; count the changed numbers."""
        weight = self.read()
        if self.stays and isinstance(weight, np.ndarray):
            return [weight]
        self.changed, self.error, self.total = 0, 0.0, 0.0
        rows = self.shape[0] if isinstance(weight, np.ndarray) else weight.shape[0]
        width = int(np.prod(self.shape)) // max(rows, 1)
        step = max(FP8_BLOCK, ROWS // max(width, 1) // FP8_BLOCK * FP8_BLOCK)
        found: dict[str, list[Host]] = {}
        wide = self.coding is not None and self.coding.strategy.startswith("tensor")
        top = _largest_scale(weight) if wide else 0.0
        for first in range(0, rows, step):
            held = held_of(rows_of(weight, first, min(first + step, rows)))
            for name, array in self._encoded(held, top).items():
                found.setdefault(name, []).append(array)
        if self.coding is None:
            return found[""]
        suffixes = [name for name, *_ in self.coding.parts(self.shape[0], self.shape[1], "F32")]
        return to_compressed.in_order(self.coding, found, suffixes, self.shape)

    def _encoded(self, held: OnGrid, top: float) -> Mapping[str, Host]:
        """Return the arrays of some rows by suffix."""
        w = held.values
        if self.kind in DENSE:
            offset = np.float32(self.offset)
            stored, back = stored_as(within(w + offset if offset else w, self.kind), self.kind)
            self._compare(w, back - offset if offset else back)
            return {"": stored}
        count, given, fitted = self._format(held, top)
        found = None
        if given is not None and w.shape[1] % count == 0:
            found = exact(held, count, given)
        if found is None:
            one = fitted()
            codes, grid = one.grid.round(w), one.grid
        else:
            codes, one = found
            grid = one.grid
        self._compare(w, grid.values(codes))
        if self.coding is None:
            return {"": FORMATS[self.kind].pack(codes, one.stored(grid))}
        main = self.coding.parts(self.shape[0], self.shape[1], "F32")[0][0]
        return {main: self.coding.packed(codes), **one.stored(grid)}

    def _format(
        self, held: OnGrid, top: float
    ) -> tuple[int, Callable[[Floats, Floats | None], Fitted] | None, Callable[[], Fitted]]:
        """Return (groups per row, maker of the grid with given scales, maker of the best fitting
        grid)."""
        w, coding = held.values, self.coding
        width = w.shape[1]
        if coding is None:
            form = FORMATS[self.kind]
            given = None if form.given is None else form.of_scales
            return width // form.size, given, lambda: form.fitted(w, None)
        most = float(np.abs(w).max(initial=0))
        return (
            coding.groups(width),
            lambda scale, zeros: coding.given(scale, zeros, "F32", top, width),
            lambda: coding.fitted(w, None, "F32", most),
        )

    def _compare(self, was: Floats, now: Floats) -> None:
        differs = unlike(was, now)
        self.total += float(np.square(was, dtype=np.float64).sum())
        if differs.any():
            self.changed += int(differs.sum())
            off = np.subtract(was, now, dtype=np.float64)
            self.error += float(np.square(off).sum())

    def said(self) -> dict[str, Any]:
        """Return a report of the conversion as plain JSON."""
        found: dict[str, Any] = {
            "tensor": self.name, "was": self.was, "kind": self.kind, "lossless": not self.changed,
            "numbers": int(np.prod(self.shape)),
        }  # fmt: skip
        if self.changed:
            share = self.error / self.total if self.total else float("inf")
            error = float(f"{share:.4g}") if np.isfinite(share) else None  # JSON has no infinity.
            found |= {"changed": self.changed, "error": error}
        return found


def within(w: Floats, kind: str) -> Floats:
    """Clip numbers so that none becomes infinite in a dense type."""
    most = np.float32(_MOST[kind])
    over = np.isfinite(w) & (np.abs(w) > most)
    return np.where(over, np.copysign(most, w), w) if over.any() else w


def unlike(was: Floats, now: Floats) -> npt.NDArray[np.bool_]:
    """Return where two arrays differ; NaN equals NaN."""
    differs: npt.NDArray[np.bool_] = was != now
    if differs.any():
        differs &= ~(np.isnan(was) & np.isnan(now))
    return differs


def rows_of(weight: Any, first: int, last: int) -> Any:
    """Return some rows of a weight."""
    if isinstance(weight, np.ndarray):
        return weight[first:last]
    if isinstance(weight, BlockWeight):
        return BlockWeight(weight.kind, weight.data[first:last], (last - first, weight.shape[1]))
    return picked(weight, np.arange(first, last), weight.name)


def held_of(weight: Any) -> OnGrid:
    """Return a weight's numbers and their grid."""
    if isinstance(weight, np.ndarray):
        return OnGrid(floats(weight).reshape(len(weight), -1).astype(np.float32))
    if isinstance(weight, BlockWeight):
        packed = quant.unpack(weight)
        scales, offsets = (host(one) for one in (packed.scales, packed.offsets) if one is not None)
        return OnGrid(host(quant.weights_of(packed)), *_turned(scales, offsets))
    if isinstance(weight, Fp8Weight):
        scales = weight.scales
        if weight.blocked:
            scales = block_scales(weight)
        return OnGrid(
            values(weight), *_turned(np.broadcast_to(scales, (len(weight.data), scales.shape[1])))
        )
    if weight.order is not None:
        return OnGrid(values(weight))
    return OnGrid(values(weight), *_turned(weight.scales, weight.offsets))


def _turned(scales: Floats, offsets: Floats | None = None) -> tuple[Floats, Floats | None]:
    """Return scales and zero points [groups, rows] of scales and offsets [rows, groups]."""
    zeros = None
    if offsets is not None:
        zeros = np.divide(-offsets, scales, out=np.zeros_like(scales), where=scales != 0)
    return np.ascontiguousarray(scales.T), None if zeros is None else np.ascontiguousarray(zeros.T)


def _largest_scale(weight: Any) -> float:
    """Return the tensor's largest scale, or the largest number of a dense one."""
    found = 0.0
    for first in range(0, weight.shape[0], 4096):
        held = held_of(rows_of(weight, first, min(first + 4096, weight.shape[0])))
        one = held.values if held.scales is None else held.scales
        found = max(found, float(np.abs(one).max(initial=0)))
    return found or 1.0


def compared(was: ModelFiles, now: ModelFiles) -> dict[str, int]:
    """Load both models, and compare every number of every weight."""
    mine, theirs = dict(load_weights(was)), dict(load_weights(now))
    if mine.keys() != theirs.keys():
        names = ", ".join(sorted(mine.keys() ^ theirs.keys())[:3])
        raise UnsupportedModel(f"the result would have other weights: {names}", param="to")
    found = {"tensors": len(mine), "numbers": 0, "changed": 0}
    for name in [*mine]:
        pair = [read_weight(one.pop(name)) for one in (mine, theirs)]
        rows = pair[0].shape[0]
        step = max(FP8_BLOCK, ROWS // max(1, int(np.prod(pair[0].shape)) // rows))
        for first in range(0, rows, step):
            a, b = (held_of(rows_of(one, first, min(first + step, rows))).values for one in pair)
            found["numbers"] += a.size
            found["changed"] += int(unlike(a, b).sum())
    return found
