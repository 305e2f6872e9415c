"""A model's weights as one backend wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from ..base.arch import Rope
from ..base.graph import AttentionSpec, Role, WeightRef
from .arrays import Array
from .weights import Weight


@dataclass(slots=True)
class RopeTable:
    """cos and sin [max_context, rotated / 2] fp32; `Rope` says which numbers make the pairs."""

    cos: Array
    sin: Array


@dataclass(slots=True)
class Prepared:
    """Weights of a model as `loader.prepare` made them for one backend."""

    by_key: dict[tuple[tuple[str, ...], Role], Weight | list[Weight] | Array] = field(
        default_factory=dict
    )
    """By `WeightRef.key`: a weight, a list of one for each copy, or a vector."""
    ropes: dict[tuple[Rope, int], RopeTable] = field(default_factory=dict)
    """By rope and the count of a head's numbers that it rotates."""
    nbytes: int = 0
    _cut: dict[object, Array] = field(default_factory=dict)
    """Parts of vectors that a rank was given, by key and cut."""

    def weight(self, ref: WeightRef) -> Weight:
        """Return all rows of it, whatever part a rank computes."""
        found = self.by_key[ref.key]
        assert not isinstance(found, list), "one weight of many copies"
        weight: Weight = found
        return weight

    def copies(self, ref: WeightRef) -> list[Weight]:
        found = self.by_key[ref.key]
        assert isinstance(found, list), "a weight of one copy"
        return found[ref.first : ref.first + ref.copies]

    def rope(self, spec: AttentionSpec) -> RopeTable | None:
        """Return the rotation table of a layer; None: its heads are not rotated."""
        return None if spec.rope is None else self.ropes[spec.rope, spec.turned]

    def biases(self, refs: Sequence[WeightRef]) -> tuple[Array, Array] | None:
        """Return the biases of a mixture, all experts' one after the other: of gate above up
        [experts · 2 · I], of down [experts · D]; None: it has no biases."""
        if not refs:
            return None
        of_gate_up, of_down = map(self.vector, refs)
        return of_gate_up, of_down

    def vector(self, ref: WeightRef) -> Array:
        """Return the vector; of a host array only the part in `WeightRef.cut`, if any."""
        assert ref.role == "vector"
        vector: Array = self.by_key[ref.key]
        if not ref.cut:
            return vector
        if (ref.key, ref.cut) not in self._cut:
            begins = [0, *accumulate(ref.rows)]
            self._cut[ref.key, ref.cut] = np.concatenate(
                [
                    one[begins[which] + first :][:count]
                    for one in vector.reshape(ref.copies, -1)
                    for which, first, count in ref.cut
                ]
            )
        return self._cut[ref.key, ref.cut]
