"""A model's weights in the form of one backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ..base.arch import Rope
from ..base.graph import AttentionSpec, Role, WeightRef
from .arrays import Array, joined
from .weights import Weight, cut_weight


@dataclass(slots=True)
class RopeTable:
    """cos and sin [max_context, rotated / 2] fp32; `Rope` defines the pairs."""

    cos: Array
    sin: Array


@dataclass(slots=True)
class Prepared:
    """Weights of a model as `loader.prepare` made them for one backend."""

    by_key: dict[tuple[tuple[str, ...], Role], Weight | list[Weight] | Array] = field(
        default_factory=dict
    )
    """By `WeightRef.key`: a weight, a list with one per copy, or a vector."""
    ropes: dict[tuple[Rope, int], RopeTable] = field(default_factory=dict)
    """By rope and by the count of a head's rotated numbers."""
    nbytes: int = 0
    _cut: dict[object, Array] = field(default_factory=dict)
    """Parts given to a rank, by key and cut."""

    def weight(self, ref: WeightRef) -> Weight:
        """Return the weight, or the rows in `WeightRef.cut`."""
        found = self.by_key[ref.key]
        assert not isinstance(found, list), "one weight of many copies"
        weight: Weight = self._part(ref, found, None)
        return weight

    def copies(self, ref: WeightRef) -> list[Weight]:
        """Return a weight's copies from `first` on, each like `weight`."""
        found = self.by_key[ref.key]
        assert isinstance(found, list), "a weight of one copy"
        numbers = range(ref.first, ref.first + ref.copies)
        return [self._part(ref, found[number], number) for number in numbers]

    def _part(self, ref: WeightRef, weight: Weight, copy: int | None) -> Weight:
        key = ref.key, ref.cut, copy
        if ref.cut and key not in self._cut:
            self._cut[key] = cut_weight(weight, ref.cut, ref.rows)
        return self._cut[key] if ref.cut else weight

    def rope(self, spec: AttentionSpec) -> RopeTable | None:
        """Return the rotation table of a layer; None: its heads are not rotated."""
        return None if spec.rope is None else self.ropes[spec.rope, spec.turned]

    def biases(self, refs: Sequence[WeightRef]) -> tuple[Array, Array] | None:
        """Return the biases of a mixture, concatenated over experts: of gate above up [experts · 2
        · I], of down [experts · D]; None without biases."""
        if not refs:
            return None
        of_gate_up, of_down = map(self.vector, refs)
        return of_gate_up, of_down

    def vector(self, ref: WeightRef) -> Array:
        """Return the vector, or the part in `WeightRef.cut`."""
        assert ref.role == "vector"
        vector: Array = self.by_key[ref.key]
        if not ref.cut:
            return vector
        if (ref.key, ref.cut) not in self._cut:
            begins = [0, *accumulate(ref.rows)]
            parts = [
                one[begins[which] + first :][:count]
                for one in vector.reshape(ref.copies, -1)
                for which, first, count in ref.cut
            ]
            self._cut[ref.key, ref.cut] = joined(parts, 0)
        return self._cut[ref.key, ref.cut]
