"""Mixtures of experts as records: see csrc/experts.h."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...base.graph import Node, RouteSpec
from ..arrays import Array, address, aligned
from ..prepared import Prepared
from ..weights import Weight
from . import records
from .emit import (
    NOT_QUANTISED,
    Emitted,
    Matrix,
    QuantisedRows,
    at_or_none,
    gate_and_up,
    matrix,
    needs_codes,
    needs_floats,
    part_of,
    parts_of,
)
from .records import ACTIVATIONS, SIX, HrExperts, HrPart, HrQuantised, HrRoute, HrSpan


class Routed(NamedTuple):
    """What `route` gives; `chosen` is int32 in the memory of floats."""

    chosen: Matrix
    shares: Matrix


def route(
    logits: Matrix, experts: int, bias: Array | None, spec: RouteSpec, routed: Routed, rows: int
) -> Emitted:
    return records.ROUTE, HrRoute(
        *logits,
        at_or_none(bias),
        *routed.chosen,
        *routed.shares,
        spec.scale,
        experts,
        spec.active,
        spec.scores == "sigmoid",
        spec.normalise,
        spec.groups,
        spec.active_groups,
        rows,
        spec.best,
        0,
    )


class Mixture(NamedTuple):
    """The experts of a layer: of each gate above up, and down."""

    gate_up: list[Weight]
    down: list[Weight]
    biases: tuple[Array, Array] | None = None
    """All experts' one after the other: [experts · 2 · I], [experts · D]."""

    @property
    def codes(self) -> bool:
        """Does an expert read its rows as int8?"""
        return any(map(needs_codes, self.gate_up))

    @property
    def floats(self) -> bool:
        return any(map(needs_floats, self.gate_up))


def of(node: Node, weights: Prepared) -> Mixture:
    """The experts of an `experts` node."""
    gate_up, down, *biases = node.weights
    return Mixture(weights.copies(gate_up), weights.copies(down), weights.biases(biases))


class Placed:
    """Room for rows one behind the other by expert, of `rows` that go to `active` each."""

    def __init__(self, mixture: Mixture, rows: int, active: int) -> None:
        experts, inner = len(mixture.down), mixture.down[0].shape[1]
        width = mixture.gate_up[0].shape[1]
        places = rows * active + (SIX - 1) * min(experts, rows * active)
        self.codes = QuantisedRows(places, width) if mixture.codes else None
        self.floats = aligned((places, width), np.float32) if mixture.floats else None
        coded = any(map(needs_codes, mixture.down))
        self.inner_codes = QuantisedRows(places, inner) if coded else None
        dense = any(map(needs_floats, mixture.down))
        self.inner_floats = aligned((places, inner), np.float32) if dense else None
        self.active = active
        self.spans = (HrSpan * (experts + 1))()
        self.row_of, self.share_of = np.empty(places, np.int32), np.empty(places, np.float32)


def experts(
    x: HrQuantised,
    floats: Matrix | None,
    routed: Routed,
    mixture: Mixture,
    placed: Placed,
    activation: str,
    y: Matrix,
    rows: int,
) -> list[Emitted]:
    """Rows to their experts, and what those make of them; `x` and `floats` as the experts read."""
    count = len(mixture.down)
    out, inner = mixture.down[0].shape
    matrices = (HrPart * (3 * count))()
    for number, weights in enumerate(zip(mixture.gate_up, mixture.down, strict=True)):
        parts = [*gate_and_up(weights[0]), *parts_of(weights[1])]
        matrices[3 * number : 3 * number + 3] = [part_of(part) for part in parts]

    def of(room: QuantisedRows | None) -> HrQuantised:
        return NOT_QUANTISED if room is None else room.struct

    def at(room: npt.NDArray[np.float32] | None) -> tuple[int | None, int]:
        return (None, 0) if room is None else matrix(room)

    op = HrExperts(
        x if mixture.codes else NOT_QUANTISED,
        *(floats if floats is not None and mixture.floats else (None, 0)),
        *routed.chosen,
        *routed.shares,
        ctypes.addressof(matrices),
        *map(at_or_none, mixture.biases or (None, None)),
        of(placed.codes),
        *at(placed.floats),
        of(placed.inner_codes),
        *at(placed.inner_floats),
        *y,
        ctypes.addressof(placed.spans),
        address(placed.row_of),
        address(placed.share_of),
        count,
        placed.active,
        mixture.gate_up[0].shape[1],
        inner,
        out,
        ACTIVATIONS[activation],
        rows,
        0,
    )
    op.keep = matrices, placed, mixture.biases
    return [(code, op) for code in (records.PLACE, records.EXPERTS_UP, records.EXPERTS_DOWN)]
