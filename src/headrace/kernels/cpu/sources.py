"""Sources of panels, weight by weight: unchanged, as exact codes, or in fewer bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ...base.config import CPU_VALUES, Decision
from ...base.graph import Role
from ..arrays import Array
from ..backend import Shelf
from ..checkpoint_values import values
from ..weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    LateWeight,
    PackedWeight,
    StackedWeight,
    Weight,
)
from .coded import EXACT, CodedWeight, KeptWeight, coded, one_order
from .encode import Encoder
from .narrow import Narrowing, NarrowWeight
from .panels import Source, in_order, packed_bytes
from .recoded import RECODED, recoded


def table(weight: Weight) -> BlockWeight | DenseWeight:
    """Prepare a weight that is read row by row, which the file's own blocks allow."""
    if isinstance(weight, PackedWeight | Fp8Weight):
        return DenseWeight(values(weight), weight.name)
    assert isinstance(weight, DenseWeight | BlockWeight)
    if isinstance(weight, BlockWeight) and weight.kind in RECODED:
        return recoded(weight).blocks()
    weight.data = in_order(weight.data)
    return weight


class PanelSources:
    """Sources of the panels of one model's products, and a record of the choices."""

    def __init__(
        self,
        quantise: str,
        encode: Encoder,
        expand: Callable[[BlockWeight], Array],
        shelf: Shelf | None = None,
    ) -> None:
        """`quantise`: the target kind of dense matrices; `expand` returns the numbers of blocks."""
        self._encode = encode
        self._shelf = shelf
        self._narrowing = Narrowing(quantise) if quantise in CPU_VALUES["quantise"] else None
        self._expand = expand
        self._in_floats: list[str] = []
        self._recoded: defaultdict[tuple[str, str], int] = defaultdict(int)
        """(kind of the file, kind of the panels) → matrices."""

    def of(self, weight: Weight, role: Role) -> list[Source]:
        """Return one source, or one for each part."""
        parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
        # All parts read their inputs in one order, or each in the model's order.
        ordered = role == "linear" and one_order(parts)
        return [self._one(part, role, ordered) for part in parts]

    def _one(self, weight: Weight, role: Role, ordered: bool) -> Source:
        if isinstance(weight, PackedWeight | Fp8Weight | LateWeight):
            return self._exact(weight, ordered)
        assert isinstance(weight, DenseWeight | BlockWeight)
        if isinstance(weight, BlockWeight) and weight.kind in RECODED:
            return self._recode(weight)
        if self._narrowing is not None and isinstance(weight, DenseWeight):
            kind = self._narrowing.kind(weight, role)
            if kind is not None:
                narrow = NarrowWeight(kind, weight, self._encode)
                self._narrowing.measure(narrow, self._expand)
                return narrow
        return weight

    def _exact(self, weight: PackedWeight | Fp8Weight | LateWeight, ordered: bool) -> Source:
        """Return a source that holds the codes' exact numbers. A `LateWeight` with kept panels is
        not read."""

        def read() -> CodedWeight | DenseWeight | BlockWeight:
            stored = weight.read() if isinstance(weight, LateWeight) else weight
            return coded(stored, ordered=ordered)

        source: CodedWeight | DenseWeight | BlockWeight | KeptWeight | None = None
        if isinstance(weight, LateWeight) and self._shelf is not None:
            kind, shape = self._shelf.kind(weight.name), weight.shape
            order = None if kind == "F32" else weight.order
            if kind in EXACT and (order is None or ordered):
                source = KeptWeight(kind, weight.name, shape, order, read)
        source = source or read()
        if isinstance(source, DenseWeight) or source.kind == "F32":
            self._in_floats.append(weight.name)
        return source

    def _recode(self, weight: BlockWeight) -> NarrowWeight:
        made = recoded(weight)
        self._recoded[weight.kind, made.kind] += 1
        return made

    @property
    def told(self) -> list[Decision]:
        """Decisions made while loading the weights."""
        made = [] if self._narrowing is None else [self._narrowing.decision()]
        if self._in_floats:
            count, first = len(self._in_floats), self._in_floats[0]
            why = f"no panels hold their numbers exactly ({first} …): four bytes a weight are read"
            made.append(Decision("matrices in fp32", str(count), why))
        for (kind, panels), count in self._recoded.items():
            read = packed_bytes(panels, (16, 256)) / 512
            why = f"{count} matrices: no panels of their own; {read:.3g} bits a weight are read"
            made.append(Decision(f"matrices in {kind}", f"panels of {panels}", why))
        return made
