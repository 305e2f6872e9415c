"""Buffers of a program, shared by liveness: values that are never alive at the same node may lie in
one place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arrays import aligned
from .emit import QuantisedRows, needs_codes, needs_floats
from .mixture import Mixture, Placed
from .records import ROWS_N

Floats = npt.NDArray[np.float32]
Buffer = Floats | QuantisedRows


class Arena:
    """Buffers by (rows, width), given back when their value dies."""

    def __init__(self, rows: dict[int, int], beside: Arena | None) -> None:
        """`rows`: how many at most, of N and of R."""
        self._rows = rows
        self._free: dict[tuple[str, int, int], list[Buffer]] = {}
        self.all: list[tuple[tuple[str, int, int], Buffer]] = (
            [] if beside is None else list(beside.all)
        )
        for key, buffer in self.all:
            self._free.setdefault(key, []).append(buffer)
        self._placed: dict[object, Placed] = {} if beside is None else beside._placed
        """Between the three records of a mixture alone, so all of one shape have one."""

    def placed(self, mixture: Mixture, active: int) -> Placed:
        shapes = [one.shape for one in (mixture.gate_up[0], mixture.down[0])]
        parts = mixture.gate_up, mixture.down
        kinds = [any(map(needs, part)) for part in parts for needs in (needs_codes, needs_floats)]
        key = (*shapes, *kinds, len(mixture.down), active)
        if key not in self._placed:
            self._placed[key] = Placed(mixture, max(self._rows.values()), active)
        return self._placed[key]

    def _take(self, kind: str, rows: int, width: int) -> Buffer | None:
        # Sampled rows also have room where there is room for all.
        for found in (rows, *((ROWS_N,) if self._rows[rows] <= self._rows[ROWS_N] else ())):
            free = self._free.get((kind, found, width))
            if free:
                return free.pop()
        return None

    def floats(self, rows: int, width: int) -> Floats:
        found = self._take("f", rows, width)
        if found is not None:
            assert isinstance(found, np.ndarray)
            return found
        stride = -(-width // 16) * 16
        stride += 16 if stride % 1024 == 0 else 0
        made = aligned((self._rows[rows], stride), np.float32)[:, :width]
        self.all.append((("f", rows, width), made))
        return made

    def codes(self, rows: int, width: int) -> QuantisedRows:
        found = self._take("q", rows, width)
        if found is not None:
            assert isinstance(found, QuantisedRows)
            return found
        made = QuantisedRows(self._rows[rows], width)
        self.all.append((("q", rows, width), made))
        return made

    def give_back(self, rows: int, width: int, buffer: Buffer) -> None:
        kind = "f" if isinstance(buffer, np.ndarray) else "q"
        self._free.setdefault((kind, rows, width), []).append(buffer)
