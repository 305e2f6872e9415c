"""Layers that keep a state as records: see csrc/recurrence.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from ..arrays import Array, address, contiguous
from ..operators import StateLayer
from . import records
from .emit import NOT_QUANTISED, Emitted, Matrix, at_or_none, norm
from .records import ACTIVATIONS, ROWS_N, HrQuantised
from .state_records import HrConv, HrMultiply, HrRecurrence


def multiply(
    x: Matrix, gate: Matrix, size: int, activation: str, y: Matrix | None, q: HrQuantised, rows: int
) -> Emitted:
    """Emit x · act(gate), for the rows that `rows` names."""
    number = ACTIVATIONS[activation]
    return records.MULTIPLY, HrMultiply(*x, *gate, *(y or (None, 0)), q, size, number, rows, 0)


def short_conv(
    x: Matrix, spec: ConvSpec, vectors: Sequence[Array], layer: StateLayer, group: int, y: Matrix
) -> Emitted:
    """Emit a short convolution. `vectors`: the taps, tap by tap, and perhaps a bias."""
    taps, *bias = vectors
    inputs = layer.inputs
    assert contiguous(inputs)
    _, room, channels = inputs.shape
    op = HrConv(
        *x,
        address(taps),
        at_or_none(bias[0] if bias else None),
        *y,
        address(inputs),
        channels,
        spec.taps,
        room,
        spec.gated,
        spec.activation == "silu",
        group,
    )
    op.keep = list(vectors)
    return records.CONV, op


def recurrence(
    given: Sequence[Matrix],
    spec: DeltaSpec | SsmSpec,
    vectors: Sequence[Array],
    layer: StateLayer,
    group: int,
    y: Matrix,
) -> Iterator[Emitted]:
    """Emit the recurrence of the node's inputs and vectors, in their order; a state space is
    followed by its norms."""
    assert layer.state is not None
    assert layer.tail is not None
    assert contiguous(layer.state)
    assert contiguous(layer.tail)
    decay, step, *skip, gain = vectors
    mixed, z, *b, a = given
    op = HrRecurrence(
        *mixed,
        *z,
        *(b[0] if b else (None, 0)),
        *a,
        address(decay),
        address(step),
        at_or_none(skip[0] if skip else None),
        address(gain),
        *y,
        address(layer.state),
        address(layer.tail),
        spec.key_heads,
        spec.value_heads,
        spec.key_size,
        spec.value_size,
        layer.tail.shape[1],
        group,
        spec.eps,
        isinstance(spec, DeltaSpec) and spec.tiled,
    )
    op.keep = list(vectors)
    yield records.RECURRENCE, op
    if isinstance(spec, SsmSpec):
        size = spec.values // spec.norm_groups
        for first in range(0, spec.values, size):
            part, own = Matrix(y.at + 4 * first, y.stride), gain[first : first + size]
            given_norm = part, None, own, spec.eps, 0.0, part, NOT_QUANTISED, ROWS_N
            emitted = norm(*given_norm)
            emitted[1].keep = own
            yield emitted
