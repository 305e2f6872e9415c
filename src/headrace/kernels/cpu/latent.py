"""Latent attention as records: see csrc/latent.h, and `kernels.latent` for the definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...base.graph import LatentSpec, Node
from ..weights import Weight
from .arena import Arena
from .emit import (
    NOT_QUANTISED,
    NOWHERE,
    Emitted,
    Matrix,
    filled,
    needs_codes,
    part_of,
    parts_of,
    quantise,
    record,
)
from .records import ROWS_N, HrLinear, HrPart, HrQuantised


def reads_codes(weights: Sequence[Weight]) -> bool:
    """Return whether rows must be int8."""
    return any(map(needs_codes, weights))


def absorb(
    node: Node, given: Sequence[Matrix], packing: Sequence[Weight], y: Matrix, arena: Arena
) -> Iterator[tuple[str, Emitted]]:
    """Emit q [N, H · (plain + rope)], latent and rotary part → packed heads, followed by the key.
    If `packing` reads codes, q's codes are made here."""
    (q, own, rotary), spec = given, node.spec
    assert isinstance(spec, LatentSpec)
    room = arena.codes(ROWS_N, spec.queries) if reads_codes(packing) else None
    codes = NOT_QUANTISED if room is None else room.struct
    if room is not None:
        yield "quantise", quantise(q, codes, spec.queries, ROWS_N)
        arena.give_back(ROWS_N, spec.queries, room)
    apart, key = spec.queries // spec.heads, spec.heads * spec.size
    latents = _columns(y, spec.rope_size)
    yield _heads(q, codes, (0, apart), packing, latents, spec.size, ROWS_N)
    yield _copy(_columns(q, spec.plain_size), apart, y, spec.size, spec.rope_size, spec.heads)
    yield _copy(rotary, 0, _columns(y, key), 0, spec.rope_size, 1)
    yield _copy(own, 0, _columns(latents, key), 0, spec.rank, 1)


def unpack(
    node: Node,
    mixed: Matrix | None,
    codes: HrQuantised,
    unpacking: Sequence[Weight],
    y: Matrix,
    rows: int,
) -> tuple[str, Emitted]:
    """Emit sums over keys [rows, H · E], as floats or codes as they are read → values [rows, H ·
    V]."""
    spec = node.spec
    assert isinstance(spec, LatentSpec)
    at = spec.rope_size, spec.size
    return _heads(mixed, codes, at, unpacking, y, spec.value_size, rows)


def _columns(x: Matrix, first: int) -> Matrix:
    return Matrix(x.at + 4 * first, x.stride)


def _heads(
    x: Matrix | None,
    codes: HrQuantised,
    columns: tuple[int, int],
    weights: Sequence[Weight],
    y: Matrix,
    apart: int,
    rows: int,
) -> tuple[str, Emitted]:
    """Emit a product for each head. `columns`: the first column of the first head, and the distance
    from head to head."""
    parts = (HrPart * len(weights))()
    for head, weight in enumerate(weights):
        (part,) = parts_of(weight)
        parts[head] = part_of(part, y=_columns(y, head * apart))
    linear: HrLinear = filled(HrLinear, codes, x or NOWHERE, parts, len(parts), rows)
    out, width = weights[0].shape
    kinds = "+".join(dict.fromkeys(parts_of(weight)[0].kind for weight in weights))
    return f"heads {len(weights)}×{out}×{width} {kinds}", record("HEADS", linear, *columns)


def _copy(
    x: Matrix, x_step: int, y: Matrix, y_step: int, size: int, times: int
) -> tuple[str, Emitted]:
    return "columns", record("COLUMNS", x, y, x_step, y_step, size, times, ROWS_N)
