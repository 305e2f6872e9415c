"""Panels that one rank computes: views of memory that all ranks share."""

from __future__ import annotations

from ..weights import PanelWeight, StackedWeight, Weight
from .panels import OUTPUTS, low_bytes


def cut_weight(weight: Weight, cut: tuple[tuple[int, int, int], ...]) -> Weight:
    """Return the rows of `WeightRef.cut`: whole panels except for the last of a weight; (): all."""
    if not cut:
        return weight
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    taken = []
    for which, first, count in cut:
        part = parts[which]
        assert isinstance(part, PanelWeight), "only panels are shared by ranks"
        taken.append(_panels(part, first, count))
    return taken[0] if len(taken) == 1 else StackedWeight(tuple(taken))


def _panels(part: PanelWeight, first: int, count: int) -> PanelWeight:
    out, width = part.shape
    assert first % OUTPUTS == 0
    assert count % OUTPUTS == 0 or first + count == out, "a panel belongs to one rank"
    panels, begin, end = -(-out // OUTPUTS), first // OUTPUTS, -(-(first + count) // OUTPUTS)
    high, low = part.nbytes - low_bytes(part), None
    if high < part.nbytes:
        each = low_bytes(part) // panels
        low = part.data[high + begin * each : high + end * each]
    each = high // panels
    data = part.data[begin * each : end * each]
    return PanelWeight(part.kind, data, (count, width), part.order, low)
