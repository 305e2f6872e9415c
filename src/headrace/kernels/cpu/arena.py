"""Buffers of a program, shared by liveness: values that are never alive at the same node may share
memory. Values that ranks exchange are in their shared memory."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..arrays import aligned
from ..ranks import RankMemory
from .emit import QuantisedRows, needs_codes, needs_floats
from .mixture import Mixture, Placed
from .records import ROWS_N

Floats = npt.NDArray[np.float32]
Buffer = Floats | QuantisedRows
ONE = Fraction(1)


class Arena:
    """Buffers by (rows, width), given back when their value dies."""

    def __init__(
        self, rows: dict[int, int], beside: Arena | None, commons: RankMemory | None
    ) -> None:
        """`rows`: the most rows of N, R and T."""
        self._rows, self.commons = rows, commons
        self._free: dict[tuple[str, int, int], list[Buffer]] = {}
        self.all: list[tuple[tuple[str, int, int], Buffer]] = (
            [] if beside is None else list(beside.all)
        )
        for key, buffer in self.all:
            self._free.setdefault(key, []).append(buffer)
        self._placed: dict[object, Placed] = {} if beside is None else beside._placed
        """Working memory of mixtures, used only between the three records of a mixture, so all
        mixtures of one shape share it."""

    def placed(self, mixture: Mixture, active: int, *, shared: bool, dealt: bool) -> Placed:
        """Return the working memory of a mixture. `shared`: ranks meet between up and down;
        `dealt`: after down."""
        shapes = [one.shape for one in (mixture.gate_up[0], mixture.down[0])]
        parts = mixture.gate_up, mixture.down
        kinds = [any(map(needs, part)) for part in parts for needs in (needs_codes, needs_floats)]
        key = (*shapes, *kinds, len(mixture.down), active, shared)
        if key not in self._placed:
            take = self._in_common if shared or dealt else None
            most = max(self._rows.values())
            self._placed[key] = Placed(mixture, most, active, take, dealt=dealt)
        return self._placed[key]

    def _take(self, kind: str, rows: int, width: int) -> Buffer | None:
        # Sampled rows may also use a buffer for all rows, if it is not smaller.
        for found in (rows, *((ROWS_N,) if self._rows[rows] <= self._rows[ROWS_N] else ())):
            free = self._free.get((kind, found, width))
            if free:
                return free.pop()
        return None

    def floats(
        self, rows: int, width: int, share: Fraction = ONE, *, exchanged: bool = False
    ) -> Floats:
        """Return room for `share` · rows."""
        kind = _kind(0, share, exchanged=exchanged)
        found = self._take(kind, rows, width)
        if found is not None:
            assert isinstance(found, np.ndarray)
            return found
        stride = -(-width // 16) * 16
        stride += 16 if stride % 1024 == 0 else 0
        shape = int(share * self._rows[rows]), stride
        room = (
            aligned(shape, np.float32) if not exchanged else self._in_common(4 * math.prod(shape))
        )
        made: Floats = room.view(np.float32).reshape(shape)[:, :width]
        self.all.append(((kind, rows, width), made))
        return made

    def codes(
        self, rows: int, width: int, share: Fraction = ONE, *, exchanged: bool = False
    ) -> QuantisedRows:
        kind = _kind(1, share, exchanged=exchanged)
        found = self._take(kind, rows, width)
        if found is not None:
            assert isinstance(found, QuantisedRows)
            return found
        most = int(share * self._rows[rows])
        made = QuantisedRows(most, width, self._in_common if exchanged else None)
        self.all.append(((kind, rows, width), made))
        return made

    def _in_common(self, size: int) -> npt.NDArray[np.uint8]:
        assert self.commons is not None
        room: npt.NDArray[np.uint8] = self.commons.take(size)
        return room

    def link(self, giver: int, width: int) -> npt.NDArray[np.uint8]:
        """Return the memory in which process `giver` hands rows [N, width] to the next stage:
        csrc/handover.h."""
        assert self.commons is not None
        room: npt.NDArray[np.uint8] = self.commons.link(
            giver, link_bytes(self._rows[ROWS_N], width)
        )
        return room

    def most(self, rows: int) -> int:
        """Return the most rows of N, R or T."""
        return self._rows[rows]

    def give_back(
        self,
        rows: int,
        width: int,
        buffer: Buffer,
        share: Fraction = ONE,
        *,
        exchanged: bool = False,
    ) -> None:
        kind = _kind(not isinstance(buffer, np.ndarray), share, exchanged=exchanged)
        self._free.setdefault((kind, rows, width), []).append(buffer)


SLOTS = 4
"""Most steps that a stage may be ahead of the next one."""


def link_bytes(rows: int, width: int) -> int:
    """Return the bytes of a link between two stages for steps of at most `rows` rows."""
    return 128 + SLOTS * (64 + 4 * rows * width)


def _kind(coded: int, share: Fraction, *, exchanged: bool) -> str:
    return f"{'fq'[coded]}{' of ranks' * exchanged}" + (f" × {share}" if share != 1 else "")
