"""A product of our kernels over any memory, to measure what share of the ceilings it reaches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from ..weights import OUTPUTS, PanelWeight
from . import emit
from .emit import NOT_QUANTISED, QuantisedRows, matrix
from .library import Team
from .panels import packed_bytes
from .records import ROWS_N, HrStep

WIDTH = 1024
"""Inputs of such a product."""


def product(
    team: Team, kind: str, data: npt.NDArray[np.uint8], rows: int, outputs: int = 0
) -> tuple[Callable[[], None], int, float]:
    """Return a function that multiplies `rows` rows with a matrix of `outputs` (0: of all `data`,
    whose bytes are its panels), the bytes of the matrix, and the operations of a call."""
    panel = packed_bytes(kind, (OUTPUTS, WIDTH))
    panels = outputs // OUTPUTS or len(data) // panel
    shape = panels * OUTPUTS, WIDTH
    weight = PanelWeight(kind, data[: panels * panel], shape)
    x, y = np.ones((rows, WIDTH), np.float32), np.empty((rows, shape[0]), np.float32)
    codes, step = QuantisedRows(rows, WIDTH), HrStep(n=rows)
    quantised = emit.needs_codes(weight)
    if quantised:
        made = emit.program([emit.quantise(matrix(x), codes.struct, WIDTH, ROWS_N)])
        team.run(made, 1, step)
    read = codes.struct if quantised else NOT_QUANTISED
    records = emit.program([emit.linear(read, matrix(x), weight, None, matrix(y), ROWS_N)])
    run = partial(_run, team, records, step, (x, y, codes))
    return run, weight.nbytes, 2.0 * rows * shape[0] * WIDTH


def _run(team: Team, records: object, step: HrStep, held: object) -> None:
    """Run a record whose arrays are `held`."""
    team.run(records, 1, step)
