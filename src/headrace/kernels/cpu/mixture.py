"""Mixtures of experts as records: see csrc/experts.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from ...base.arch import Scoring
from ...base.exchange import ExchangeSpec
from ...base.graph import Node, RouteSpec
from ..arrays import Array, aligned
from ..dealing import Dealing
from ..prepared import Prepared
from ..weights import Weight
from .emit import (
    NOT_QUANTISED,
    NOWHERE,
    Emitted,
    Matrix,
    QuantisedRows,
    filled,
    gate_and_up,
    matrix,
    needs_codes,
    needs_floats,
    part_of,
    parts_of,
    piece,
    record,
)
from .records import ACTIVATIONS, CODES, SIX, HrDeal, HrPart, HrPiece, HrQuantised, HrSpan


class Routed(NamedTuple):
    """Results of `route`; `chosen` is int32 in the memory of floats."""

    chosen: Matrix
    shares: Matrix


def route(
    logits: Matrix,
    experts: int,
    vectors: tuple[Array | None, Array | None],
    spec: RouteSpec,
    routed: Routed,
    rows: int,
) -> Emitted:
    """Emit routing. `vectors`: bias of the choice and gains of the routing weights."""
    scores = get_args(Scoring).index(spec.scores)
    choice = spec.active, scores, spec.normalise, spec.groups, spec.active_groups, rows, spec.best
    return record("ROUTE", logits, *vectors, *routed, spec.scale, experts, *choice)


class Mixture(NamedTuple):
    """Experts of a layer: for each, gate above up, and down."""

    gate_up: list[Weight]
    down: list[Weight]
    biases: tuple[Array, Array] | None = None
    """Biases of all experts, one after the other: [experts · 2 · I], [experts · D]."""

    @property
    def codes(self) -> bool:
        """Whether an expert reads its rows as int8."""
        return any(map(needs_codes, self.gate_up))

    @property
    def floats(self) -> bool:
        return any(map(needs_floats, self.gate_up))


def of(node: Node, weights: Prepared) -> Mixture:
    """Return the experts of an `experts` node."""
    gate_up, down = map(weights.copies, node.weights[:2])
    return Mixture(gate_up, down, weights.biases(node.weights[2:]))


class Placed:
    """Working memory for rows in the order of their experts: `rows` rows with `active` experts
    each.

    `take` returns memory of all ranks. Each rank makes a part of the columns between up and down,
    or the results of its own experts if whole experts are `dealt` to ranks.
    """

    def __init__(
        self,
        mixture: Mixture,
        rows: int,
        active: int,
        take: Callable[[int], npt.NDArray[np.uint8]] | None = None,
        *,
        dealt: bool = False,
    ) -> None:
        experts, inner = len(mixture.down), mixture.down[0].shape[1]
        width = mixture.gate_up[0].shape[1]
        places = rows * active + (SIX - 1) * min(experts, rows * active)
        self.codes = QuantisedRows(places, width) if mixture.codes else None
        self.floats = aligned((places, width), np.float32) if mixture.floats else None
        self.values: npt.NDArray[np.float32] | None = None
        if dealt and take is not None:
            shape = places, -(-mixture.down[0].shape[0] // 16) * 16
            self.values = take(4 * shape[0] * shape[1]).view(np.float32).reshape(shape)
            take = None
        self.own = (HrSpan * (experts + 1))()
        coded = any(map(needs_codes, mixture.down))
        self.inner_codes = QuantisedRows(places, inner, take) if coded else None
        self.inner_floats: npt.NDArray[np.float32] | None = None
        if any(map(needs_floats, mixture.down)):
            shape = places, inner
            room = aligned(shape, np.float32) if take is None else take(4 * places * inner)
            self.inner_floats = room.view(np.float32).reshape(shape)
        self.active = active
        self.spans = (HrSpan * (experts + 1))()
        self.row_of, self.share_of = np.empty(places, np.int32), np.empty(places, np.float32)


def deal_of(dealing: Dealing, mixture: int, placed: Placed) -> HrDeal:
    """Describe the placement of a mixture's experts: this rank's experts, and the place of their
    results."""
    owners, went, values = dealing.owners[mixture], dealing.went[mixture], placed.values
    assert values is not None
    given = owners, went, placed.own, matrix(values), dealing.rank
    made: HrDeal = filled(HrDeal, *given)
    made.keep = made.keep, placed
    return made


def pieces(placed: Placed, inner: ExchangeSpec | None, deal: HrDeal | None) -> list[HrPiece]:
    """Describe what ranks exchange: their inner columns, or their experts' results."""
    if deal is not None:
        assert placed.values is not None
        bounds = 0, placed.values.shape[1]
        return [piece(placed.values, bounds, -1, placed.spans, deal.owners)]
    rooms = [room for room in (placed.inner_codes, placed.inner_floats) if room is not None]
    return [] if inner is None else [piece(one, inner.bounds, -1, placed.spans) for one in rooms]


def experts(
    x: HrQuantised,
    floats: Matrix | None,
    routed: Routed,
    mixture: Mixture,
    placed: Placed,
    how: tuple[str, bool],
    y: Matrix,
    rows: int,
    share: ExchangeSpec | None = None,
    deal: HrDeal | None = None,
) -> list[Emitted]:
    """Emit the placement of rows, up and down; `x` and `floats` are the experts' inputs. `how`:
    their activation, and whether routing weights multiply the inputs. `share`: the columns between
    up and down made here, if not all. With a `deal` a fourth record sums."""
    count = len(mixture.down)
    out, inner = mixture.down[0].shape
    matrices = (HrPart * (3 * count))()
    for number, weights in enumerate(zip(mixture.gate_up, mixture.down, strict=True)):
        parts = [*gate_and_up(weights[0]), *parts_of(weights[1])]
        matrices[3 * number : 3 * number + 3] = [part_of(part) for part in parts]

    def of(room: QuantisedRows | None, first: int = 0) -> HrQuantised:
        return NOT_QUANTISED if room is None else room.columns(first)

    def at(room: npt.NDArray[np.float32] | None, first: int = 0) -> Matrix:
        return NOWHERE if room is None else matrix(room[:, first:])

    def op(first: int, size: int) -> Emitted:
        """Emit the rows' placement, with these columns between up and down."""
        code, made = record(
            "PLACE",
            x if mixture.codes else NOT_QUANTISED,
            floats if floats is not None and mixture.floats else NOWHERE,
            *routed,
            matrices,
            *(mixture.biases or (None, None)),
            *(of(placed.codes), at(placed.floats)),
            *(of(placed.inner_codes, first), at(placed.inner_floats, first), y),
            *(placed.spans, placed.row_of, placed.share_of),
            None if deal is None else ctypes.addressof(deal),
            *(count, placed.active, mixture.gate_up[0].shape[1], size, out),
            *(ACTIVATIONS[how[0]], rows, how[1]),
        )
        made.keep = made.keep, placed, deal
        return code, made

    _, down = op(0, inner)
    place, up = op(*share.mine) if share else (CODES["PLACE"], down)
    made = [(place, up), (CODES["EXPERTS_UP"], up), (CODES["EXPERTS_DOWN"], down)]
    return made if deal is None else [*made, (CODES["EXPERTS_SUM"], down)]
