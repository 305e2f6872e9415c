"""Layers that keep a state as records: see csrc/recurrence.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from ..arrays import Array, contiguous
from ..operators import StateLayer
from .emit import NOT_QUANTISED, NOWHERE, Emitted, Matrix, norm, record
from .records import ACTIVATIONS, ROWS_N, HrQuantised


def multiply(
    x: Matrix, gate: Matrix, size: int, activation: str, y: Matrix | None, q: HrQuantised, rows: int
) -> Emitted:
    """Emit x · act(gate) for the rows that `rows` names."""
    return record("MULTIPLY", x, gate, y or NOWHERE, q, size, ACTIVATIONS[activation], rows)


def short_conv(
    x: Matrix, spec: ConvSpec, vectors: Sequence[Array], layer: StateLayer, group: int, y: Matrix
) -> Emitted:
    """Emit a short convolution. `vectors`: the kernel, tap by tap, and an optional bias."""
    taps, *bias = vectors
    assert contiguous(layer.inputs)
    _, room, channels = layer.inputs.shape
    given = x, taps, *(bias or (None,)), y, layer.inputs
    sizes = channels, spec.taps, room, spec.gated, spec.activation == "silu", group
    return record("CONV", *given, *sizes)


def recurrence(
    given: Sequence[Matrix],
    spec: DeltaSpec | SsmSpec,
    vectors: Sequence[Array],
    layer: StateLayer,
    group: int,
    y: Matrix,
) -> Iterator[Emitted]:
    """Emit the recurrence of the node's inputs and vectors, in order; for a state space its norms
    follow."""
    assert layer.state is not None
    assert layer.tail is not None
    assert contiguous(layer.state)
    assert contiguous(layer.tail)
    decay, step, *skip, gain = vectors
    mixed, z, *b, a = given
    tiled = isinstance(spec, DeltaSpec) and spec.tiled
    yield record(
        "RECURRENCE",
        *(mixed, z, *(b or (NOWHERE,)), a),
        *(decay, step, *(skip or (None,)), gain, y, layer.state, layer.tail),
        *(spec.key_heads, spec.value_heads, spec.key_size, spec.value_size),
        *(layer.tail.shape[1], group, spec.eps, tiled),
    )
    if isinstance(spec, SsmSpec):
        size = spec.values // spec.norm_groups
        for first in range(0, spec.values, size):
            part, own = Matrix(y.at + 4 * first, y.stride), gain[first : first + size]
            yield norm(part, None, own, spec.eps, 0.0, part, NOT_QUANTISED, ROWS_N)
