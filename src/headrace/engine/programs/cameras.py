"""Camera frames as a program's input: their age, a motion filter, their pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...base.errors import InvalidRequest
from ...programs.ocr.pixels import Codes, resized
from ...programs.onnx import Port
from ...programs.rows import Array
from .executor import ServedProgram

JUMP_SECONDS = 1.0
"""Seconds in the future from which a frame means that its camera's clock has jumped."""
WINDOW_SECONDS = 60.0
"""Seconds after which the least delay is forgotten, because clocks drift."""
CELLS = 16
"""Cells along each side of a picture, whose brightness is compared."""
MOST_PIXELS = 2**24


class CaptureClock:
    """A camera's clock compared with ours.

    Neither clock has to be right. The smallest recent difference counts as no delay, so a frame's
    age is its difference above that. A jump of the camera's clock restarts the measurement.
    """

    def __init__(self) -> None:
        self.jumps = 0
        self._last = -math.inf
        self._older = self._newer = math.inf
        self._begun = 0.0

    def delay(self, captured: float, now: float) -> float:
        """Return the seconds that a frame was delayed, above the least; `now`: of our clock."""
        difference = now - captured
        jumped = captured < self._last or difference < min(self._older, self._newer) - JUMP_SECONDS
        if jumped and self._last > -math.inf:
            self.jumps += 1
            self._older = self._newer = math.inf
        if now - self._begun > WINDOW_SECONDS:
            self._older, self._newer, self._begun = self._newer, math.inf, now
        self._last, self._newer = captured, min(self._newer, difference)
        return difference - min(self._older, self._newer)


class MotionFilter:
    """A test whether a picture differs from the last one that passed."""

    def __init__(self, threshold: float, refresh: float) -> None:
        """`threshold`: least change of a cell's mean brightness, 0 to 1; 0: all pass. `refresh`:
        seconds after which an unchanged picture passes, too."""
        self._threshold, self._refresh = threshold, refresh
        self._cells: Array | None = None
        self._passed = -math.inf

    def passes(self, pixels: Codes, now: float) -> bool:
        """Return whether a picture [h, w, 3] of this moment passes."""
        if not self._threshold:
            return True
        cells = _brightness(pixels)
        before = self._cells
        still = (
            before is not None
            and before.shape == cells.shape
            and now - self._passed < self._refresh
            and float(np.abs(cells - before).max()) < self._threshold
        )
        if not still:
            self._cells, self._passed = cells, now
        return not still

    def forget(self) -> None:
        """Let the next picture pass."""
        self._cells = None


def _brightness(pixels: Codes) -> Array:
    """Return the mean brightness, 0 to 1, of a picture's cells [at most 16, at most 16]."""
    found: Array = pixels
    for axis in (0, 1):
        edges = np.linspace(0, pixels.shape[axis], min(CELLS, pixels.shape[axis]) + 1).astype(int)
        sums = np.add.reduceat(found, edges[:-1], axis, dtype=np.float64)
        found = sums / np.diff(edges).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
    return np.asarray(np.mean(found, 2) / 255)


@dataclass(frozen=True, slots=True)
class CameraInput:
    """The picture input of a program."""

    port: Port
    height: int
    width: int
    rows_last: bool
    """Whether the layout is [1, h, w, 3] instead of [1, 3, h, w]."""
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    reversed: bool
    """Whether channels are blue, green, red."""

    @classmethod
    def of(
        cls,
        program: ServedProgram,
        size: Sequence[int] | None,
        *,
        scale: float | None = None,
        mean: Sequence[float] = (0, 0, 0),
        std: Sequence[float] = (1, 1, 1),
        reversed: bool = False,
    ) -> CameraInput:
        """Find a program's picture input. `size`: height and width, if the program leaves them
        open. An element is (code · scale - mean) / std; `scale` is 1/255 by default for floats.

        Raises `InvalidRequest` for a program whose inputs are not exactly one picture.
        """
        ports = [*program.confined.inputs.values()]
        dims = (ports[0].dims or ()) if len(ports) == 1 else ()
        last = len(dims) == 4 and dims[3] == 3 and dims[1] != 3
        if len(dims) != 4 or 3 not in (dims[1], dims[3]) or dims[0] in range(2, 2**31):
            takes = ", ".join(map(str, ports))
            wrong = f"{program.name} takes {takes}; a camera's program takes one picture"
            raise InvalidRequest(f"{wrong}, [1, 3, h, w] or [1, h, w, 3]", param="model")
        fixed = dims[1:3] if last else dims[2:]
        wanted = [one for one in size or fixed if isinstance(one, int) and one > 0]
        agrees = all(
            not isinstance(one, int) or one in wanted[at : at + 1] for at, one in enumerate(fixed)
        )
        if len(wanted) != 2 or not agrees or math.prod(wanted) > MOST_PIXELS:
            given = list(size) if size else None
            allowed = f"{program.name} has {list(fixed)!r}, and needs both as numbers"
            raise InvalidRequest(f"size is {given!r:.80}; {allowed}", param="size")
        if scale is None:
            scale = 1.0 if np.dtype(ports[0].type).kind in "iu" else 1 / 255
        return cls(ports[0], wanted[0], wanted[1], last, scale, tuple(mean), tuple(std), reversed)

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.height, self.width
        return (1, *rows, 3) if self.rows_last else (1, 3, *rows)

    def of_pixels(self, pixels: Codes) -> Array:
        """Return the input for a picture [h, w, 3], stretched to the program's size."""
        found: Array = resized(pixels, self.width, self.height)
        if self.reversed:
            found = found[..., ::-1]
        kind = np.dtype(self.port.type)
        if (self.scale, set(self.mean), set(self.std)) != (1.0, {0}, {1}) or kind.kind == "f":
            mean, std = (np.array(one, np.float32) for one in (self.mean, self.std))
            found = (found * np.float32(self.scale) - mean) / std
        if kind.kind in "iu":
            info = np.iinfo(kind)
            found = np.clip(np.rint(found), info.min, info.max)
        found = found if self.rows_last else found.transpose(2, 0, 1)
        return np.ascontiguousarray(found[None], kind)

    def of_bytes(self, data: bytes | bytearray) -> Array:
        """Return the input whose elements are these bytes, row by row. Raises `InvalidRequest`."""
        kind = np.dtype(self.port.type).newbyteorder("<")
        if (due := math.prod(self.shape) * kind.itemsize) != len(data):
            wrong = f"the frame has {len(data):,} bytes; {self.port.type} {list(self.shape)}"
            raise InvalidRequest(f"{wrong} has {due:,}", param="frame")
        return np.frombuffer(data, kind).reshape(self.shape).astype(self.port.type, copy=False)
