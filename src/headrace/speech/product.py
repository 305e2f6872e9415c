"""A matrix of the CPU library, for networks that compute in numpy between products."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..kernels.arrays import address, aligned
from ..kernels.cpu import emit
from ..kernels.cpu.emit import NOT_QUANTISED, Matrix, QuantisedRows
from ..kernels.cpu.library import Team
from ..kernels.cpu.panels import Packer
from ..kernels.cpu.records import ROWS_N, HrPart, HrStep
from ..kernels.weights import DenseWeight
from ..loader.q8_0 import q8_0

Floats = npt.NDArray[np.float32]
Precision = Literal["exact", "int8"]
"""Form of the weights: the file's own, with sums in fp32; or 8-bit codes with a scale per 32, and
likewise for activations."""
MAX_ROWS = 2_048
"""Most rows of a product at a time."""


class Product:
    """Product of rows with a matrix [out, width], plus a bias. A row's result does not depend on
    other rows. A product has one caller at a time."""

    def __init__(
        self,
        team: Team,
        packer: Packer,
        weight: npt.NDArray[Any],
        bias: Floats | None,
        step: int = 0,
        *,
        coded: bool = False,
        activation: str | None = None,
    ) -> None:
        """Pack the matrix. `step`: distance between the starts of successive rows; 0: rows do not
        overlap. `coded`: quantise weights and rows to eight bits if the width is a multiple of 32.
        `activation`: one of the library's, applied to the results."""
        self._team, (self.out, self._width) = team, weight.shape
        self._step = step or self._width
        coded = coded and not self._width % 32
        source = q8_0(weight) if coded else DenseWeight(np.ascontiguousarray(weight))
        self._packed = packer.pack(source)
        self._bias = None
        if bias is not None:
            self._bias = aligned((self.out,), np.float32)
            self._bias[:] = bias
        x, y = Matrix(0, self._step), Matrix(0, self.out)
        self._room = QuantisedRows(MAX_ROWS, self._width) if coded else None
        codes = NOT_QUANTISED if self._room is None else self._room.struct
        emitted = [
            emit.linear(
                codes,
                None if coded else x,
                self._packed,
                self._bias,
                y,
                ROWS_N,
                activation=activation,
            )
        ]
        self._linear: Any = emitted[0][1]
        self._part = HrPart.from_address(self._linear.parts)
        self._quantise: Any = None
        if coded:
            before = emit.quantise(x, codes, self._width, ROWS_N)
            self._quantise = before[1]
            emitted.insert(0, before)
        self._records, self._count = emit.program(emitted), len(emitted)

    def __call__(self, x: Floats, rows: int | None = None) -> Floats:
        """Compute [rows, out]; x must have all numbers of the last row; None: as many rows as x
        has."""
        x = np.ascontiguousarray(x)
        count = len(x) if rows is None else rows
        y = np.empty((count, self.out), np.float32)
        for first in range(0, count, MAX_ROWS):
            at = address(x) + 4 * first * self._step
            if self._quantise is None:
                self._linear.dense = at
            else:
                self._quantise.x = at
            self._part.y = address(y) + 4 * first * self.out
            self._team.run(self._records, self._count, HrStep(n=min(MAX_ROWS, count - first)))
        return y


def layer_norm(x: Floats, gain: Floats, shift: Floats | None = None) -> Floats:
    """Scale each row to mean 0 and deviation 1, times `gain`, plus `shift`."""
    y: Floats = x - x.mean(axis=1, keepdims=True)
    y *= 1 / np.sqrt((y * y).mean(axis=1, keepdims=True) + np.float32(1e-5))
    y *= gain
    if shift is not None:
        y += shift
    return y


def silu(x: Floats) -> Floats:
    """Compute x times its sigmoid."""
    y: Floats = np.exp(-x)
    y += 1
    return np.divide(x, y, out=y)


def softmax(scores: Floats) -> Floats:
    """Apply softmax in place, row by row."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
