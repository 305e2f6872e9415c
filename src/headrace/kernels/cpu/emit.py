"""Operators as records: the one place that fills in the C structs.

Every function returns (code, struct). Matrices are fp32 and row-major; `Matrix` is the address of
one and the number of floats from row to row. The memory that a struct points to must outlive it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import Structure
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...base.graph import AttentionSpec
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
from . import records
from .panels import kind_of
from .rank_records import HrExchange, HrHandover, HrPiece
from .records import (
    ACTIVATIONS,
    INDICES,
    KINDS,
    SIX,
    UNIT,
    HrAttention,
    HrBidirectional,
    HrEmbed,
    HrGated,
    HrGateUp,
    HrKv,
    HrLayerNorm,
    HrLinear,
    HrLora,
    HrLoraPart,
    HrNorm,
    HrPart,
    HrQuantise,
    HrQuantised,
    HrRope,
    HrRowsOp,
    HrSample,
    HrScatter,
    HrSix,
)

Emitted = tuple[int, Structure]
KV_KINDS = {
    "float32": KINDS["F32"],
    "float16": KINDS["F16"],
    "bfloat16": KINDS["BF16"],
    "int8": records.KV_I8,
    "k8v4": records.KV_K8V4,
}


class Matrix(NamedTuple):
    at: int
    stride: int


def matrix(x: Array) -> Matrix:
    """Describe a 2-D fp32 array with dense rows."""
    assert dtype_name(x) == "float32"
    assert x.ndim == 2
    # With at most one column or no rows, the stride of columns means nothing.
    assert stride(x, 1) == 1 or x.shape[1] <= 1 or not len(x)
    return Matrix(address(x), stride(x, 0))


def at_or_none(vector: Array | None) -> int | None:
    """Return the address of a vector, or None."""
    return None if vector is None else address(vector)


class QuantisedRows:
    """Room for `rows` rows of activations in int8 with their units."""

    def __init__(
        self, rows: int, width: int, take: Callable[[int], npt.NDArray[np.uint8]] | None = None
    ) -> None:
        """`take` gives memory of a number of bytes; without it, memory is allocated here."""
        units = width // UNIT
        shape = -(-rows // SIX), units, ctypes.sizeof(HrSix)
        self.data = aligned(shape, np.uint8) if take is None else take(math.prod(shape))
        self.struct = HrQuantised(address(self.data), units)

    def columns(self, first: int) -> HrQuantised:
        """Return the same rows from column `first` on."""
        assert first % UNIT == 0
        at = address(self.data) + first // UNIT * ctypes.sizeof(HrSix)
        return HrQuantised(at, self.struct.stride)


NOT_QUANTISED = HrQuantised(None, 0)


def parts_of(weight: Weight) -> list[PanelWeight]:
    parts = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    assert all(isinstance(part, PanelWeight) for part in parts), "the weight was not prepared"
    return [part for part in parts if isinstance(part, PanelWeight)]


def order_of(weight: Weight) -> Array | None:
    """Return the order of inputs that all its parts in codes share (`PanelWeight.order`)."""
    return next((part.order for part in parts_of(weight) if part.order is not None), None)


def needs_codes(weight: Weight) -> bool:
    """Return whether a part is block-quantised, so that activations must come as int8, in order."""
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
    into = int(accumulate) if activation is None else records.ACTIVATED + ACTIVATIONS[activation]
    parts = parts_of(weight)
    array = (HrPart * len(parts))()
    first = 0
    for part, slot in zip(parts, array, strict=True):
        out, width = part.shape
        slot.data, slot.kind, slot.out, slot.in_ = (
            address(part.data),
            KINDS[part.kind],
            out,
            width,
        )
        slot.low = at_or_none(part.low)
        slot.bias = None if bias is None else address(bias) + 4 * first
        slot.y, slot.y_stride = y.at + 4 * first, y.stride
        slot.accumulate = into
        first += out
    op = HrLinear(
        q,
        None if x is None else x.at,
        0 if x is None else x.stride,
        ctypes.addressof(array),
        len(parts),
        rows,
    )
    op.keep = array
    return records.LINEAR, op


def exchange(commons: RankMemory, place: int, pieces: Sequence[HrPiece]) -> Emitted:
    """Emit an exchange. `pieces`: data that ranks without common memory send each other; else
    unused."""
    array = (HrPiece * len(pieces))(*pieces)
    given = ctypes.addressof(array), commons.ranks, place, len(pieces)
    op = HrExchange(commons.fence, *given)
    op.keep = array, pieces
    return records.EXCHANGE, op


def handover(
    commons: RankMemory, link: npt.NDArray[np.uint8], rows: Matrix, width: int, most: int, step: int
) -> Emitted:
    """Emit the handover of rows [N, width], at most `most`, to the next stage (`step` 1) or from
    the preceding one (-1)."""
    given = *rows, width, commons.process + step * commons.ranks, step > 0, most
    op = HrHandover(commons.fence, address(link), *given)
    op.keep = link
    return records.HANDOVER, op


def piece(
    room: npt.NDArray[Any] | QuantisedRows,
    bounds: Sequence[int],
    rows: int,
    spans: Any = None,
    owners: int | None = None,
) -> HrPiece:
    """Describe a piece of an exchange. `bounds`: by rank, the columns of `room` that each has, or
    of all with rows by `owners` (an address). `rows`: as in `records`; -1: one."""
    if isinstance(room, QuantisedRows):
        data, together, size = room.data, SIX, ctypes.sizeof(HrSix)
        bounds, step = [bound // UNIT for bound in bounds], room.struct.stride * size
    else:
        data, together, size, step = room, 1, room.itemsize, stride(room, 0) * room.itemsize
    limits = np.array(bounds, np.int64) * size
    at = None if spans is None else ctypes.addressof(spans)
    made = HrPiece(address(data), step, address(limits), at, owners, rows, together)
    made.keep = limits, room, spans
    return made


def sample(logits: Matrix, vocab: int, tokens: npt.NDArray[np.int64]) -> tuple[int, HrSample]:
    """Emit a draw of tokens [R], by rules that are set before each run."""
    return records.SAMPLE, HrSample(*logits, None, address(tokens), vocab)


def embed(weight: Weight, scale: float, y: Matrix, index: str = "tokens") -> Emitted:
    """Emit a lookup of table rows; `index` names the step's numbers that select them: see
    `records.INDICES`."""
    assert isinstance(weight, BlockWeight | DenseWeight)
    vocab, size = weight.shape
    data = weight.data
    return records.EMBED, HrEmbed(
        address(data),
        stride(data, 0) * data.itemsize,
        *y,
        scale,
        KINDS[kind_of(weight)],
        vocab,
        size,
        INDICES[index],
        0,
    )


def scatter(y: Matrix, size: int) -> tuple[int, HrScatter]:
    """Emit a copy of rows into y; rows and places are set before each run."""
    return records.SCATTER, HrScatter(None, size, None, 0, *y, size)


def fill_scatter(op: HrScatter, rows: Array, places: Array) -> None:
    """Set the rows [M, D], in fp32, and the places of the next runs; both must live until then."""
    assert dtype_name(rows) == "float32"
    assert dtype_name(places) == "int64"
    assert rows.shape == (len(places), op.size)
    op.x, op.x_stride, op.places = address(rows), stride(rows, 0), address(places)
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
    return records.NORM, HrNorm(
        *x,
        *(residual or (None, 0)),
        address(weight),
        *(y or (None, 0)),
        q,
        eps,
        offset,
        len(weight),
        rows,
    )


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
    return records.LAYER_NORM, HrLayerNorm(
        *x,
        *(residual or (None, 0)),
        address(weight),
        None if bias is None else address(bias),
        *(y or (None, 0)),
        q,
        eps,
        len(weight),
        rows,
        0,
    )


def quantise(
    x: Matrix, q: HrQuantised, size: int, rows: int, order: Array | None = None
) -> Emitted:
    """Emit a quantisation. `order`, int32 [size]: the index in x of each number; None: in order."""
    op = HrQuantise(*x, q, at_or_none(order), size, rows)
    op.keep = order
    return records.QUANTISE, op


def gated(
    x: Matrix, size: int, activation: str, y: Matrix | None, q: HrQuantised, rows: int
) -> Emitted:
    return records.GATED, HrGated(*x, *(y or (None, 0)), q, size, ACTIVATIONS[activation], rows, 0)


def activate(
    x: Matrix, size: int, activation: str, y: Matrix | None, q: HrQuantised, rows: int
) -> Emitted:
    return records.ACTIVATE, gated(x, size, activation, y, q, rows)[1]


def gate_up(x: HrQuantised, weight: Weight, activation: str, q: HrQuantised, rows: int) -> Emitted:
    gate, up = map(part_of, gate_and_up(weight))
    return records.GATE_UP, HrGateUp(x, gate, up, q, ACTIVATIONS[activation], rows)


def part_of(part: PanelWeight) -> HrPart:
    """Describe the matrix alone, for records that say elsewhere where its product goes."""
    return HrPart(address(part.data), None, None, None, 0, KINDS[part.kind], *part.shape, 0)


def gate_and_up(weight: Weight) -> list[PanelWeight]:
    """Return its parts; of a single part both halves, if they are whole panels."""
    parts = parts_of(weight)
    if len(parts) > 1 or parts[0].shape[0] % (2 * OUTPUTS):
        return parts
    (one,) = parts
    middle, shape = one.nbytes // 2, (one.shape[0] // 2, one.shape[1])
    return [PanelWeight(one.kind, half, shape) for half in (one.data[:middle], one.data[middle:])]


def can_gate(weight: Weight) -> bool:
    """Return whether this is gate above up, each quantised, of one shape, and whole units wide."""
    parts = gate_and_up(weight)
    return (
        len(parts) == 2
        and parts[0].shape == parts[1].shape
        and parts[0].shape[0] % UNIT == 0
        and not needs_floats(weight)
    )


def kv(layer: KvLayer, heads: int, kv_heads: int, group: int) -> HrKv:
    assert contiguous(layer.k)
    assert contiguous(layer.v)
    shared = layer.v is layer.k
    scales: tuple[int | None, int | None] = (None, None)
    kind = dtype_name(layer.k)
    if kind == "int8":
        assert layer.k_scale is not None
        assert layer.v_scale is not None
        assert contiguous(layer.k_scale)
        assert contiguous(layer.v_scale)
        scales = (address(layer.k_scale), address(layer.v_scale))
        if dtype_name(layer.v) == "uint8":
            kind = "k8v4"
    return HrKv(
        address(layer.k),
        None if shared else address(layer.v),
        *scales,
        KV_KINDS[kind],
        layer.block_size,
        heads,
        kv_heads,
        layer.k.shape[-1],
        group,
        *_bias(layer.bias),
    )


def _bias(bias: KeyBias | None) -> tuple[int | None, int | None, int | None, int | None, int, int]:
    """Return the last fields of `HrKv`."""
    if bias is None:
        return None, None, None, None, 0, 0
    angles: tuple[int | None, int | None] = (None, None)
    rotated = 0
    if bias.rope is not None:
        angles = address(bias.rope.cos), address(bias.rope.sin)
        rotated = 2 * bias.rope.cos.shape[1]
    return address(bias.values), *angles, address(bias.turns), rotated, bias.interleaved


def rope(
    cache: HrKv, qkv: Matrix, spec: AttentionSpec, norms: Sequence[Array], table: RopeTable | None
) -> Emitted:
    """Emit the rotation. Without a table only the norms are applied, and K and V written."""
    rotated, pairs = 0, spec.rope is not None and spec.rope.interleaved
    angles: tuple[int | None, int | None] = (None, None)
    if table is not None:
        assert contiguous(table.cos)
        assert contiguous(table.sin)
        rotated, angles = 2 * table.cos.shape[1], (address(table.cos), address(table.sin))
    given = [*map(address, norms), None, None]
    return records.ROPE, HrRope(
        cache,
        *qkv,
        *given[:2],
        *angles,
        spec.eps,
        spec.norm_offset,
        rotated,
        pairs,
        spec.whole_norm and bool(norms),
        records.VALUES[spec.values],
        *(spec.growth or (0.0, 1))[:2],
        spec.behind,
        spec.growth[2] if spec.growth else 0,
    )


def attention(
    cache: HrKv,
    q: Matrix,
    y: Matrix | None,
    out: HrQuantised,
    sinks: Array | None,
    spec: AttentionSpec,
    rows: int,
    coarse: bool = False,
) -> Emitted:
    """Emit attention of q [N, H · E]. With `rows` R the results are those of the sampled tokens,
    one after the other. `coarse`: if KV is in codes, queries and weights have eight bits instead of
    fifteen."""
    numbers = spec.scale, spec.softcap or 0.0, rows, spec.chunked, coarse, 0
    return records.ATTENTION, HrAttention(
        cache, *q, *(y or (None, 0)), out, at_or_none(sinks), *numbers
    )


def bidirectional(qkv: Matrix, heads: int, size: int, scale: float, y: Matrix) -> Emitted:
    """Emit qkv [N, 3 · H · E] → y [N, H · E]: every token sees its whole entry."""
    return records.BIDIRECTIONAL, HrBidirectional(*qkv, *y, scale, heads, size, 0)


def select(x: Matrix, y: Matrix, size: int) -> Emitted:
    return records.SELECT, HrRowsOp(*x, *y, size, records.ROWS_R, 0.0, 0)


def add(x: Matrix, y: Matrix, size: int, rows: int, factor: float = 1.0) -> Emitted:
    """Emit y += factor · x."""
    return records.ADD, HrRowsOp(*x, *y, size, rows, factor, 0)


def softcap(y: Matrix, size: int, cap: float) -> Emitted:
    return records.SOFTCAP, HrRowsOp(None, 0, *y, size, records.ROWS_R, cap, 0)


def scale(y: Matrix, size: int, factor: float, rows: int = records.ROWS_R) -> Emitted:
    return records.SCALE, HrRowsOp(None, 0, *y, size, rows, factor, 0)


def lora(
    x: Matrix, addition: LoraWeight, inner: Matrix, y: Matrix, rows: int
) -> tuple[Emitted, Emitted]:
    """Emit A · x into `inner` [N or R, parts · rank], then B · inner added to y."""
    assert addition.down.is_contiguous()
    assert all(up.is_contiguous() for up in addition.up)
    parts = (HrLoraPart * len(addition.up))()
    first = 0
    for slot, up in zip(parts, addition.up, strict=True):
        slot.up, slot.out, slot.first = up.data_ptr(), up.shape[2], first
        first += up.shape[2]
    op = HrLora(
        *x,
        *inner,
        *y,
        addition.down.data_ptr(),
        addition.ranks.ctypes.data,
        ctypes.addressof(parts),
        len(parts),
        addition.room,
        addition.down.shape[2],
        rows,
        0,
    )
    op.keep = parts, addition
    return (records.LORA_DOWN, op), (records.LORA_UP, op)


def program(emitted: Sequence[Emitted]) -> ctypes.Array[records.HrRecord]:
    """Make of the records the array that `Team.run` takes; it keeps the structs alive."""
    array = (records.HrRecord * max(len(emitted), 1))()
    for slot, (code, op) in zip(array, emitted, strict=False):
        assert type(op) is records.STRUCTS[code], f"record {code} is no {type(op).__name__}"
        slot.code, slot.op = code, ctypes.addressof(op)
    array.keep = [op for _, op in emitted]  # type: ignore[attr-defined]
    return array
