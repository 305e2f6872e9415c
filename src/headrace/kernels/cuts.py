"""The rows of weights that one rank computes: views of what lies in memory once for all ranks."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from .arrays import Array
from .weights import PanelWeight, StackedWeight, Weight

Cut = tuple[tuple[int, int, int], ...]
"""(which part, first row, how many), one below the other: `WeightRef.cut`."""
PANEL = 16
"""Outputs in a panel of the CPU kernels."""
PLANES, _HIGH, _LOW = "Q8_0_PLANES", 352, 192
"""The kind whose panels lie in two planes, and bytes of a unit in each (cpu/csrc/layout.h)."""


def cut_weight(weight: Weight, cut: Cut) -> Weight:
    """Whole panels but for the last of a weight: `base.cut` cuts so."""
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    taken = []
    for which, first, count in cut:
        part = parts[which]
        assert isinstance(part, PanelWeight), "only panels are shared by ranks"
        taken.append(_panels(part, first, count))
    return taken[0] if len(taken) == 1 else StackedWeight(tuple(taken))


def cut_vector(vector: Array, sizes: tuple[int, ...], cut: Cut) -> Array:
    """The same of vectors of these sizes, one after the other."""
    begins = [0, *accumulate(sizes)]
    runs = [vector[begins[which] + first :][:count] for which, first, count in cut]
    return np.concatenate(runs)


def _panels(part: PanelWeight, first: int, count: int) -> PanelWeight:
    out, width = part.shape
    assert first % PANEL == 0
    assert count % PANEL == 0 or first + count == out, "a panel belongs to one rank"
    panels, begin, end = -(-out // PANEL), first // PANEL, -(-(first + count) // PANEL)
    data, low = part.data, part.low
    if part.kind == PLANES and low is None:
        high = part.nbytes // (_HIGH + _LOW) * _HIGH
        data, low = data[:high], data[high:]
    each = data.nbytes // panels
    if low is not None:
        each_low = low.nbytes // panels
        low = low[begin * each_low : end * each_low]
    return PanelWeight(part.kind, data[begin * each : end * each], (count, width), part.order, low)
