"""Operators as records: the one place that fills in the C structs.

Every function returns (code, struct). Matrices are fp32 and row-major; a `Matrix` is an address and
the number of floats from row to row. Its memory must outlive the struct.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...base.graph import AttentionSpec, NormSpec
from ..arrays import Array, address, aligned, contiguous, dtype_name, stride
from ..key_bias import KeyBias
from ..operators import KvLayer
from ..prepared import RopeTable
from ..ranks import RankMemory
from ..weights import (
    OUTPUTS,
    BlockWeight,
    DenseWeight,
    LoraWeight,
    PanelWeight,
    StackedWeight,
    Weight,
)
from .panels import kind_of
from .records import (
    ACTIVATED,
    ACTIVATIONS,
    CODES,
    HEADER,
    INDICES,
    KINDS,
    KV_KINDS,
    ROWS_N,
    ROWS_R,
    SIX,
    STRUCTS,
    UNIT,
    VALUES,
    HrKv,
    HrPart,
    HrPiece,
    HrQuantised,
    HrRecord,
    HrSix,
)

Emitted = tuple[int, Structure]


class Matrix(NamedTuple):
    at: int
    stride: int


NOWHERE = Matrix(0, 0)
"""Matrix of an unused field."""
NOT_QUANTISED = HrQuantised()


def matrix(x: Array) -> Matrix:
    """Describe a 2-D fp32 array with dense rows."""
    assert dtype_name(x) == "float32"
    assert x.ndim == 2
    # With at most one column or no rows, the stride of columns means nothing.
    assert stride(x, 1) == 1 or x.shape[1] <= 1 or not len(x)
    return Matrix(address(x), stride(x, 0))


def record(name: str, *values: Any) -> Emitted:
    """Emit a record by its name in csrc/records.h: see `filled`."""
    code = CODES[name]
    return code, filled(STRUCTS[code], *values)


def filled(kind: type[Structure], *values: Any) -> Any:
    """Make a struct from the values of its fields, in order; the last ones are zero if not given.

    A `Matrix` gives two fields, an array its address. The struct keeps the values alive, but not
    the memory of a `Matrix` or another address.
    """
    made = kind(*_fields(values))
    made.keep = values
    return made


def _fields(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Matrix):
            yield from value
        elif isinstance(value, ctypes.Array):
            yield ctypes.addressof(value)
        elif isinstance(value, np.ndarray) or hasattr(value, "data_ptr"):
            yield address(value)
        else:
            yield value


class QuantisedRows:
    """Room for `rows` rows of activations in int8 with their units."""

    def __init__(
        self, rows: int, width: int, take: Callable[[int], npt.NDArray[np.uint8]] | None = None
    ) -> None:
        """`take` returns memory of a number of bytes; without it, memory is allocated here."""
        units = width // UNIT
        shape = -(-rows // SIX), units, ctypes.sizeof(HrSix)
        self.data = aligned(shape, np.uint8) if take is None else take(math.prod(shape))
        self.struct: HrQuantised = filled(HrQuantised, self.data, units)

    def columns(self, first: int) -> HrQuantised:
        """Return the same rows from column `first` on."""
        assert first % UNIT == 0
        at = address(self.data) + first // UNIT * ctypes.sizeof(HrSix)
        return HrQuantised(at, self.struct.stride)


def parts_of(weight: Weight) -> list[PanelWeight]:
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    assert all(isinstance(part, PanelWeight) for part in parts), "the weight was not prepared"
    return [part for part in parts if isinstance(part, PanelWeight)]


def order_of(weight: Weight) -> Array | None:
    """Return the order of inputs that all quantised parts share (`PanelWeight.order`)."""
    return next((part.order for part in parts_of(weight) if part.order is not None), None)


def needs_codes(weight: Weight) -> bool:
    """Return whether a part is block-quantised, so that activations must be int8, in order."""
    coded = any(KINDS[part.kind] < KINDS["F32"] for part in parts_of(weight))
    return coded and order_of(weight) is None


def needs_floats(weight: Weight) -> bool:
    dense = any(KINDS[part.kind] >= KINDS["F32"] for part in parts_of(weight))
    return dense or order_of(weight) is not None


def linear(
    q: HrQuantised,
    x: Matrix | None,
    weight: Weight,
    bias: Array | None,
    y: Matrix,
    rows: int,
    *,
    accumulate: bool = False,
    activation: str | None = None,
) -> Emitted:
    """Emit a product. `accumulate`: y += the product; `activation`: y = act(the product)."""
    assert not (accumulate and activation)
    into = int(accumulate) if activation is None else ACTIVATED + ACTIVATIONS[activation]
    parts = parts_of(weight)
    array = (HrPart * len(parts))()
    first = 0
    for index, part in enumerate(parts):
        added = None if bias is None else address(bias) + 4 * first
        array[index] = part_of(part, added, Matrix(y.at + 4 * first, y.stride), into)
        first += part.shape[0]
    return record("LINEAR", q, x or NOWHERE, array, len(parts), rows)


def part_of(
    part: PanelWeight, bias: int | None = None, y: Matrix = NOWHERE, into: int = 0
) -> HrPart:
    """Describe a matrix, the address of its bias and the place of its product. Some records give
    the place of products elsewhere."""
    made: HrPart = filled(HrPart, part.data, part.low, bias, y, KINDS[part.kind], *part.shape, into)
    return made


def exchange(commons: RankMemory, place: int, pieces: Sequence[HrPiece]) -> Emitted:
    """Emit an exchange. `pieces`: data that ranks without shared memory send each other; otherwise
    unused."""
    array = (HrPiece * len(pieces))(*pieces)
    code, op = record("EXCHANGE", commons.fence, array, commons.ranks, place, len(pieces))
    op.keep = op.keep, pieces
    return code, op


def handover(
    commons: RankMemory, link: npt.NDArray[np.uint8], rows: Matrix, width: int, most: int, step: int
) -> Emitted:
    """Emit the handover of rows [N, width], at most `most`, to the next stage (`step` 1) or from
    the preceding one (-1)."""
    peer = commons.process + step * commons.ranks
    return record("HANDOVER", commons.fence, link, rows, width, peer, step > 0, most)


def piece(
    room: npt.NDArray[Any] | QuantisedRows,
    bounds: Sequence[int],
    rows: int,
    spans: Any = None,
    owners: int | None = None,
) -> HrPiece:
    """Describe a piece of an exchange. `bounds`: by rank, its columns of `room`; with `owners` (an
    address) rows are divided instead. `rows`: as in `records`; -1: one."""
    if isinstance(room, QuantisedRows):
        data, together, size = room.data, SIX, ctypes.sizeof(HrSix)
        bounds, step = [bound // UNIT for bound in bounds], room.struct.stride * size
    else:
        data, together, size, step = room, 1, room.itemsize, stride(room, 0) * room.itemsize
    limits = np.array(bounds, np.int64) * size
    made: HrPiece = filled(HrPiece, data, step, limits, spans, owners, rows, together)
    return made


def sample(logits: Matrix, vocab: int, tokens: npt.NDArray[np.int64]) -> Emitted:
    """Emit a draw of tokens [R] by rules, which are set before each run."""
    return record("SAMPLE", logits, None, tokens, vocab)


def embed(
    weight: Weight, scale: float, y: Matrix, index: str = "tokens", rows: int = ROWS_N
) -> Emitted:
    """Emit a lookup of table rows; `index` names the step's numbers that select them: see
    `records.INDICES`."""
    assert isinstance(weight, BlockWeight | DenseWeight)
    row = stride(weight.data, 0) * weight.data.itemsize
    kind = KINDS[kind_of(weight)]
    return record("EMBED", weight.data, row, y, scale, kind, *weight.shape, INDICES[index], rows)


def scatter(y: Matrix, size: int, *, adds: bool = False) -> Emitted:
    """Emit a copy of rows into y, or a sum; rows and places are set before each run."""
    return record("SCATTER", None, size, None, 0, y, size, adds)


def fill_scatter(op: Any, rows: Array, places: Array, first: int = 0) -> None:
    """Set the fp32 rows [M, ·] and the places for the next runs; both must outlive them. Columns
    from `first` on are used."""
    assert dtype_name(rows) == "float32"
    assert dtype_name(places) == "int64"
    assert rows.shape[0] == len(places)
    assert first + op.size <= rows.shape[1]
    op.x, op.x_stride, op.places = address(rows) + 4 * first, stride(rows, 0), address(places)
    op.count = len(places)


def norm(
    x: Matrix,
    residual: Matrix | None,
    weight: Array,
    eps: float,
    offset: float,
    y: Matrix | None,
    q: HrQuantised,
    rows: int,
) -> Emitted:
    given = x, residual or NOWHERE, weight, y or NOWHERE, q
    return record("NORM", *given, eps, offset, len(weight), rows)


def layer_norm(
    x: Matrix,
    residual: Matrix | None,
    weight: Array,
    bias: Array | None,
    eps: float,
    y: Matrix | None,
    q: HrQuantised,
    rows: int,
) -> Emitted:
    given = x, residual or NOWHERE, weight, bias, y or NOWHERE, q
    return record("LAYER_NORM", *given, eps, len(weight), rows)


def adaptive_norm(
    x: Matrix,
    gains: Matrix,
    shifts: Matrix,
    spec: NormSpec,
    y: Matrix | None,
    q: HrQuantised,
    size: int,
) -> Emitted:
    """Emit a layer norm of all tokens, with gains and shifts [B, size] per entry."""
    given = x, NOWHERE, gains.at, shifts.at, y or NOWHERE, q
    assert spec.offset == 1.0, "gains are added to one"
    return record("LAYER_NORM", *given, spec.eps, size, ROWS_N, 0, gains.stride, shifts.stride)


def modulate(x: Matrix, factors: Matrix, y: Matrix, size: int) -> Emitted:
    """Emit y += factor · x for all tokens, with factors [B, size] per entry; without x, y +=
    factor."""
    return record("MODULATE", x, factors, y, size)


def quantise(
    x: Matrix, q: HrQuantised, size: int, rows: int, order: Array | None = None
) -> Emitted:
    """Emit a quantisation. `order`, int32 [size]: the index in x of each number; None: in order."""
    return record("QUANTISE", x, q, order, size, rows)


def gated(
    x: Matrix, size: int, activation: str, y: Matrix | None, q: HrQuantised, rows: int
) -> Emitted:
    return record("GATED", x, y or NOWHERE, q, size, ACTIVATIONS[activation], rows)


def activate(
    x: Matrix, size: int, activation: str, y: Matrix | None, q: HrQuantised, rows: int
) -> Emitted:
    return record("ACTIVATE", x, y or NOWHERE, q, size, ACTIVATIONS[activation], rows)


def gate_up(x: HrQuantised, weight: Weight, activation: str, q: HrQuantised, rows: int) -> Emitted:
    gate, up = map(part_of, gate_and_up(weight))
    return record("GATE_UP", x, gate, up, q, ACTIVATIONS[activation], rows)


def gate_and_up(weight: Weight) -> list[PanelWeight]:
    """Return its parts, or both halves of a single part if they are whole panels."""
    parts = parts_of(weight)
    if len(parts) > 1 or parts[0].shape[0] % (2 * OUTPUTS):
        return parts
    (one,) = parts
    middle, shape = one.nbytes // 2, (one.shape[0] // 2, one.shape[1])
    return [PanelWeight(one.kind, half, shape) for half in (one.data[:middle], one.data[middle:])]


def can_gate(weight: Weight) -> bool:
    """Return whether this is gate above up, both quantised, of one shape, and whole units wide."""
    parts = gate_and_up(weight)
    return (
        len(parts) == 2
        and parts[0].shape == parts[1].shape
        and parts[0].shape[0] % UNIT == 0
        and not needs_floats(weight)
    )


def no_kv(spec: AttentionSpec) -> HrKv:
    """Describe the heads of a layer whose K and V are not kept."""
    return HrKv(heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.size)


def kv(layer: KvLayer, heads: int, kv_heads: int, group: int) -> HrKv:
    assert contiguous(layer.k)
    assert contiguous(layer.v)
    kind, v = dtype_name(layer.k), None if layer.v is layer.k else layer.v
    scales = [layer.k_scale, layer.v_scale] if kind == "int8" else []
    assert all(scale is not None and contiguous(scale) for scale in scales)
    if scales and dtype_name(layer.v) == "uint8":
        kind = "k8v4"
    sizes = layer.block_size, heads, kv_heads, layer.k.shape[-1], group
    given = layer.k, v, *(scales or (None, None)), KV_KINDS[kind], *sizes, *_bias(layer.bias)
    made: HrKv = filled(HrKv, *given)
    return made


def _bias(bias: KeyBias | None) -> tuple[Any, ...]:
    """Return the last fields of `HrKv`."""
    if bias is None:
        return ()
    if bias.rope is None:
        return bias.values, None, None, bias.turns, 0, bias.interleaved
    cos, sin = bias.rope.cos, bias.rope.sin
    return bias.values, cos, sin, bias.turns, 2 * cos.shape[1], bias.interleaved


def rope(
    cache: HrKv, qkv: Matrix, spec: AttentionSpec, norms: Sequence[Array], table: RopeTable | None
) -> Emitted:
    """Emit the rotation. Without a table only the norms are applied, and K and V written."""
    pairs = spec.rope is not None and spec.rope.interleaved
    rotated, cos, sin, axes = 0, None, None, None
    if table is not None:
        rotated, cos, sin = 2 * table.cos.shape[1], table.cos, table.sin
        assert contiguous(cos)
        assert contiguous(sin)
        if spec.rope is not None and spec.rope.axes:
            axes = np.array(spec.rope.axes, np.int32)
    growth, every, first = spec.growth or (0.0, 1, 0)
    whole = spec.whole_norm and bool(norms)
    given = cache, qkv, *[*norms, None, None][:2], cos, sin, axes, spec.eps, spec.norm_offset
    values = rotated, pairs, whole, VALUES[spec.values], growth, every, spec.behind, first
    return record("ROPE", *given, *values)


def attention(
    cache: HrKv,
    q: Matrix,
    y: Matrix | None,
    out: HrQuantised,
    sinks: Array | None,
    spec: AttentionSpec,
    rows: int,
    coarse: bool = False,
    across: bool = False,
) -> Emitted:
    """Emit attention of q [N, H · E]. With `rows` R the results are those of the sampled tokens, in
    sequence. `coarse`: with quantised KV, queries and weights have eight bits instead of fifteen;
    `across`: by `HrStep.across`."""
    numbers = spec.scale, spec.softcap or 0.0, rows, spec.chunked, coarse, across
    return record("ATTENTION", cache, q, y or NOWHERE, out, sinks, *numbers)


def bidirectional(
    qkv: Matrix, heads: int, size: int, scale: float, y: Matrix, *more: Any, windowed: bool = False
) -> Emitted:
    """Emit qkv [N, 3 · H · E] → y [N, H · E]: every token sees its whole entry, or its window.
    `more`: kv [T, 2 · H · E] of texts that are seen instead, biases, `AttentionSpec.reach`."""
    return record("BIDIRECTIONAL", qkv, y, scale, heads, size, windowed, *more)


def select(x: Matrix, y: Matrix, size: int) -> Emitted:
    return record("SELECT", x, y, size, ROWS_R)


def columns(x: Matrix, y: Matrix, size: int, rows: int) -> Emitted:
    """Emit a copy of columns."""
    return record("COLUMNS", x, y, 0, 0, size, 1, rows)


def add(x: Matrix, y: Matrix, size: int, rows: int, factor: float = 1.0) -> Emitted:
    """Emit y += factor · x."""
    return record("ADD", x, y, size, rows, factor)


def softcap(y: Matrix, size: int, cap: float) -> Emitted:
    return record("SOFTCAP", NOWHERE, y, size, ROWS_R, cap)


def scale(y: Matrix, size: int, factor: float, rows: int = ROWS_R) -> Emitted:
    return record("SCALE", NOWHERE, y, size, rows, factor)


def lora(
    x: Matrix, addition: LoraWeight, inner: Matrix, y: Matrix, rows: int
) -> tuple[Emitted, Emitted]:
    """Emit A · x into `inner` [N or R, parts · rank], then B · inner added to y."""
    assert addition.down.is_contiguous()
    assert all(up.is_contiguous() for up in addition.up)
    kind: Any = HEADER.struct("HrLoraPart")
    parts, first = (kind * len(addition.up))(), 0
    for index, up in enumerate(addition.up):
        parts[index] = filled(kind, up, up.shape[2], first)
        first += up.shape[2]
    sizes = len(parts), addition.room, addition.down.shape[2], rows
    down, op = record("LORA_DOWN", x, inner, y, addition.down, addition.ranks, parts, *sizes)
    op.keep = op.keep, addition
    return (down, op), (CODES["LORA_UP"], op)


def program(emitted: Sequence[Emitted]) -> ctypes.Array[HrRecord]:
    """Return the records as the array that `Team.run` takes; it keeps the structs alive."""
    array = (HrRecord * max(len(emitted), 1))()
    for slot, (code, op) in zip(array, emitted, strict=False):
        assert type(op) is STRUCTS[code], f"record {code} is no {type(op).__name__}"
        slot.code, slot.op = code, ctypes.addressof(op)
    array.keep = [op for _, op in emitted]  # type: ignore[attr-defined]
    return array
