"""Convolutions and group norms over pictures as records: see csrc/pictures.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...base.denoising import strip_of
from ...base.graph import GroupNormSpec, Node, PictureConvSpec
from .arena import Arena
from .emit import NOT_QUANTISED, Emitted, Matrix, linear, matrix, needs_codes, quantise, record
from .fusion import rows_of
from .records import ROWS_N, ROWS_T


def records(
    node: Node, x: Matrix, y: Matrix, weights: Sequence[Any], arena: Arena
) -> Iterator[tuple[str, Emitted]]:
    """Yield (name, record) of a convolution or a group norm.

    A convolution is done strip by strip: the rows around each place side by side, in a room that
    all strips share, then a product with them. Its step has the rows of a strip in T.
    """
    spec, (out,) = node.spec, node.out
    if isinstance(spec, GroupNormSpec):
        given = x, y, *weights, spec.eps, out.width, spec.groups, spec.silu, rows_of(out)
        yield "group_norm", record("GROUP_NORM", *given)
        return
    assert isinstance(spec, PictureConvSpec)
    weight, bias = weights
    count, wide = out.rows.of(arena.most(ROWS_N)), node.weights[0].width
    strip = strip_of(count)
    rows = arena.floats(ROWS_T, wide)
    codes = arena.codes(ROWS_T, wide) if needs_codes(weight) else None
    at, room = matrix(rows), NOT_QUANTISED if codes is None else codes.struct
    for first in range(0, count, strip):
        yield "around", record("AROUND", x, at, first, node.reads[0].width, *spec)
        if codes is not None:
            yield "quantise", quantise(at, room, wide, ROWS_T)
        to = Matrix(y.at + 4 * first * y.stride, y.stride)
        yield "conv", linear(room, at, weight, bias, to, ROWS_T)
    arena.give_back(ROWS_T, wide, rows)
    if codes is not None:
        arena.give_back(ROWS_T, wide, codes)
