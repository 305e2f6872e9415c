"""Dense matrices quantised while they are loaded, and the measured error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...base.config import Decision
from ...base.graph import Role
from ..arrays import Array, floats
from ..weights import BlockWeight, DenseWeight
from .mapped import give_back

Encode = Callable[[str, Array], npt.NDArray[np.uint8]]
SAMPLES = 64
"""Rows of each matrix, evenly spread, on which the error is measured."""
_AT_ONCE = 1 << 20
"""Numbers encoded at a time: encoders take some ten bytes for each."""
_LEAST, _SMALL = 32, 256
"""Outputs below which a matrix stays dense, or gets eight bits: routers, gates of states."""


@dataclass(slots=True)
class NarrowWeight:
    """Matrix to become blocks of `kind`, made only if no panels of it are kept."""

    kind: str
    source: DenseWeight | BlockWeight
    encode: Encode

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    @property
    def name(self) -> str:
        return self.source.name

    def first(self, rows: int) -> BlockWeight:
        """Return its first rows."""
        return self.rows(np.arange(min(rows, self.shape[0])))

    def rows(self, which: npt.NDArray[np.intp]) -> BlockWeight:
        blocks = self.encode(self.kind, self.source.data[which])
        return BlockWeight(self.kind, blocks, (len(which), self.shape[1]), self.name)

    def blocks(self) -> BlockWeight:
        (out, width), data = self.shape, self.source.data
        step = max(1, _AT_ONCE // width)
        made = self.encode(self.kind, data[:step])
        whole = np.empty((out, made.shape[1]), np.uint8)
        for at in range(0, out, step):
            whole[at : at + step] = self.encode(self.kind, data[at : at + step]) if at else made
            give_back(data[at : at + step])
        return BlockWeight(self.kind, whole, self.shape, self.name)


class Narrowing:
    """Choice of each matrix's kind with `--quantise int8` or `int4`, and the measured loss."""

    def __init__(self, wish: str) -> None:
        self.wish = wish
        self._matrices, self._lost, self._size = 0, 0.0, 0.0
        self._worst = (0.0, "")

    def kind(self, weight: DenseWeight, role: Role) -> str | None:
        """Return the kind that the weight becomes; None: it stays unchanged."""
        out, width = weight.shape
        if role not in ("linear", "moe", "logits") or width % 32 or out < _LEAST:
            return None
        if self.wish == "int8" or role == "logits" or out < _SMALL:
            return "Q8_0"
        return "Q4_K" if width % 256 == 0 else "Q4_0"

    def measure(self, weight: NarrowWeight, expand: Callable[[BlockWeight], Array]) -> None:
        """Compare some of its rows with the numbers that `expand` makes of their blocks."""
        out = weight.shape[0]
        which = np.linspace(0, out - 1, min(out, SAMPLES)).astype(np.intp)
        # Sums of squares in place: fresh memory for each would cost more than everything else here.
        wanted, found = floats(weight.source.data[which]), expand(weight.rows(which))
        found -= wanted
        found *= found
        wanted *= wanted
        lost, size = (float(each.sum(dtype=np.float64)) for each in (found, wanted))
        self._matrices += 1
        self._lost += lost
        self._size += size
        self._worst = max(self._worst, (math.sqrt(lost / size) if size else 0.0, weight.name))

    def decision(self) -> Decision:
        """Report the quantised matrices and the measured error."""
        if not self._matrices:
            reason = f"{self.wish} has no effect: no matrix of the model is dense and large enough"
            return Decision("quantise", "auto", reason)
        error = math.sqrt(self._lost / self._size) if self._size else 0.0
        return Decision(
            "quantise",
            self.wish,
            f"{self._matrices} dense matrices; root mean square error of a weight "
            f"{100 * error:.2f} %, at most {100 * self._worst[0]:.2f} % ({self._worst[1]})",
        )
