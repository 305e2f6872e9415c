"""Weights in panels: repacked from a file's blocks or dense tensors, or found in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Array, address, contiguous, dtype_name
from ..backend import Shelf
from ..weights import LOW_BYTES, OUTPUTS, PLANES, UNIT_BYTES, BlockWeight, DenseWeight, PanelWeight
from .coded import CodedWeight, KeptWeight
from .library import Team, allocate, forget, load
from .mapped import give_back
from .narrow import NarrowWeight
from .records import KINDS

Bytes = npt.NDArray[np.uint8]
Made = DenseWeight | BlockWeight | CodedWeight | NarrowWeight
Source = Made | KeptWeight
DENSE_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
LOW_SHARE = LOW_BYTES / UNIT_BYTES
"""Share of the low plane in `PLANES`."""
_CHUNK = 64 << 20
_AT_ONCE = 32 << 20
"""Bytes of a weight that are packed before its pages are released."""
_ALIGNMENT = 64


def kind_of(weight: Source) -> str:
    if isinstance(weight, DenseWeight):
        return DENSE_KINDS[dtype_name(weight.data)]
    return weight.kind


def packed_bytes(kind: str, shape: tuple[int, int]) -> int:
    """Return the bytes of a weight in panels; −1 if its kind or shape has none."""
    return int(load().hr_packed_bytes(KINDS.get(kind, 0), *shape))


def panel_kind(weight: Source, planes: bool) -> str:
    """Return the kind of its panels; `planes`: in two planes if its kind can be."""
    kind = kind_of(weight)
    apart = planes and kind == "Q8_0" and not isinstance(weight, CodedWeight | KeptWeight)
    return PLANES if apart else kind


def pack(
    weight: Made,
    team: Team,
    room: Bytes | None = None,
    *,
    planes: bool = False,
) -> PanelWeight:
    """Pack the weight into panels of 16 outputs (csrc/layout.h). `room` is uint8 of `packed_bytes`,
    aligned to 64; without it memory is allocated."""
    if isinstance(weight, NarrowWeight):
        weight = weight.blocks()
    kind, data = panel_kind(weight, planes), in_order(weight.data)
    size = packed_bytes(kind, weight.shape)
    if size < 0:
        raise ValueError(f"a {kind} matrix of shape {weight.shape} has no panels")
    target = allocate(size) if room is None else room
    out, width = weight.shape
    if isinstance(weight, CodedWeight):
        held = [None if each is None else in_order(each) for each in (weight.scales, weight.zeros)]
        at = address(data), *(None if each is None else address(each) for each in held)
        given = KINDS[kind], *at, weight.group, out, width, address(target)
        load().hr_pack_coded(team.handle, *given)
        return PanelWeight(kind, target, weight.shape, weight.order)
    row_bytes = data.nbytes // out
    # Each plane holds all panels, so a weight in planes is packed at once.
    step = out if kind == PLANES else max(1, _AT_ONCE // row_bytes // OUTPUTS) * OUTPUTS
    for first in range(0, out, step):
        rows = min(step, out - first)
        to = address(target) + first // OUTPUTS * packed_bytes(kind, (OUTPUTS, width))
        given = address(data) + first * row_bytes, row_bytes, rows, width, to
        load().hr_pack(team.handle, KINDS[kind], *given)
        give_back(data[first : first + rows])
    return PanelWeight(kind, target, weight.shape)


class Packer:
    """Packer of one model's weights into a few regions of huge pages; kept ones come from a shelf.

    Weights share regions: separate 2 MiB pages for the small matrices of each layer would waste
    more than half of the default model's size.
    """

    def __init__(self, team: Team, shelf: Shelf | None = None) -> None:
        self._team, self._shelf = team, shelf
        self._region = np.empty(0, np.uint8)
        self._proven: set[str] = set()

    def pack(self, weight: Source, *, planes: bool = False) -> PanelWeight:
        """Return the weight in panels. The pages of a mapped source are released. So are those of
        panels that the shelf took: they are not read until it returns them."""
        kind, shape, shelf = panel_kind(weight, planes), weight.shape, self._shelf
        found = self._find(weight, kind, shape)
        if found is not None:
            _give_back(weight)  # Some rows of it were read, to measure or to check.
            return found
        if isinstance(weight, KeptWeight):
            return self.pack(weight.read(), planes=planes)
        room = self._room(max(packed_bytes(kind, shape), 0))
        packed = pack(weight, self._team, room, planes=planes)
        _give_back(weight)
        if shelf is not None and weight.name:

            def replace(kept: npt.NDArray[Any]) -> None:
                packed.data = kept
                # Any remaining view of a region, even an empty one, keeps all of it in memory.
                self._region = np.empty(0, np.uint8)

            if shelf.keep(weight.name, kind, shape, packed.data, replace):
                forget(address(packed.data), packed.data.nbytes)
        return packed

    def _find(self, weight: Source, kind: str, shape: tuple[int, int]) -> PanelWeight | None:
        shelf = self._shelf
        if shelf is None or not weight.name:
            return None
        kept = shelf.find(weight.name, kind, shape, packed_bytes(kind, shape))
        if kept is None:
            return None
        order = weight.order if isinstance(weight, CodedWeight | KeptWeight) else None
        panels = PanelWeight(kind, kept, shape, order)
        if kind not in self._proven:
            # This detects a change of the layout without a new version number.
            if not self._proof(weight, panels):
                shelf.refuse(f"{weight.name} is not laid out as this version lays it out")
                return None
            self._proven.add(kind)
        return panels

    def _proof(self, weight: Source, panels: PanelWeight) -> bool:
        """Return whether the first panel equals a freshly packed one."""
        rows = min(OUTPUTS, weight.shape[0])
        first: Made
        if isinstance(weight, CodedWeight | NarrowWeight | KeptWeight):
            first = weight.first(rows)
        elif isinstance(weight, BlockWeight):
            first = BlockWeight(weight.kind, in_order(weight.data[:rows]), (rows, weight.shape[1]))
        else:
            first = DenseWeight(in_order(weight.data[:rows]))
        fresh = pack(first, self._team, planes=panels.kind == PLANES)
        size, begin = (each.nbytes - each.low_bytes for each in (fresh, panels))
        low = fresh.data[size:]
        return np.array_equal(fresh.data[:size], panels.data[:size]) and np.array_equal(
            low, panels.data[begin : begin + low.nbytes]
        )

    def _room(self, size: int) -> Bytes:
        """Return zeroed uint8[size] of the current region, or of a new one."""
        if size > self._region.nbytes:
            self._region = allocate(max(size, _CHUNK))
        room = self._region[:size]
        self._region = self._region[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return room


def _give_back(weight: Source) -> None:
    """Release the pages of a mapped weight, few of which are needed again."""
    source = weight.source if isinstance(weight, NarrowWeight) else weight
    if isinstance(source, DenseWeight | BlockWeight):
        give_back(source.data)


def in_order(data: Array) -> Array:
    """Return the same numbers in C order, without gaps."""
    if contiguous(data):
        return data
    return np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data.contiguous()
