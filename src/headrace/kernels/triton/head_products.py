"""Products of each head by a matrix of its own: queries to latents, and sums of latents to values.

Arithmetic: the matrices of all heads are H · rank · size numbers: 33 MB of both kinds a layer with
the 128 heads of DeepSeek-V3, 4 MB with 16 of V2-Lite. They are read once for up to a tile of rows:
below some 200 rows their bytes bind, above the tensor cores. A head's product alone would be a
launch of a microsecond's work, 256 of them a layer; here it is one grid. The parts that are not
multiplied (a head's rotated part and the key) go along, which saves three copies: they are 10 % of
the bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...base.graph import LatentSpec
from .moe_tiles import ExpertTable, matrix_at
from .support import matrix_product

FEW_ROWS = 64
"""Most rows for which tiles have 16, so that more programs stream a matrix."""
INNER = 64
OUTS = 64


@triton.jit
def _tile(
    x,
    weight,
    rows,
    out,
    count,
    width,
    outs,
    x_stride,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Compute x [rows, width] · weight [outs, width]ᵀ of a tile."""
    inner = tl.arange(0, INNER)
    real = (rows < count)[:, None]
    at = x + rows.to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_at = weight + out[None, :] * width + inner[:, None]
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for low in range(0, width, INNER):
        there = inner < width - low
        a = tl.load(at, mask=real & there[None, :], other=0.0)
        b = tl.load(weight_at, mask=(out < outs)[None, :] & there[:, None], other=0.0)
        total = matrix_product(a, b, total)
        at += INNER
        weight_at += INNER
    return total


@triton.jit(do_not_specialize=["count"])
def _absorb_kernel(
    q,
    latent,
    rotary,
    addresses,
    y,
    count,
    heads,
    q_stride,
    latent_stride,
    rotary_stride,
    RANK: tl.constexpr,
    PLAIN: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Pack the heads [heads + 1, ROPE + RANK] of each row; the last is the key."""
    head = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    place = rows.to(tl.int64)
    real = (rows < count)[:, None]
    wide = real & (out < RANK)[None, :]
    turned = tl.arange(0, ROPE_PADDED)
    beside = real & (turned < ROPE)[None, :] & (tl.program_id(1) == 0)
    to = y + place[:, None] * ((heads + 1) * (ROPE + RANK)) + head * (ROPE + RANK)
    if head == heads:
        own = tl.load(latent + place[:, None] * latent_stride + out[None, :], mask=wide, other=0.0)
        tl.store(to + ROPE + out[None, :], own, mask=wide)
        at = rotary + place[:, None] * rotary_stride
    else:
        own_q = q + head * (PLAIN + ROPE)
        weight = matrix_at(addresses, head, q.dtype.element_ty)
        total = _tile(own_q, weight, rows, out, count, PLAIN, RANK, q_stride, ROWS, OUTS, INNER)
        tl.store(to + ROPE + out[None, :], total.to(y.dtype.element_ty), mask=wide)
        at = own_q + PLAIN + place[:, None] * q_stride
    part = tl.load(at + turned[None, :], mask=beside, other=0.0)
    tl.store(to + turned[None, :], part, mask=beside)


@triton.jit(do_not_specialize=["count"])
def _unpack_kernel(
    mixed,
    addresses,
    y,
    count,
    heads,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    head = tl.program_id(2)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    weight = matrix_at(addresses, head, mixed.dtype.element_ty)
    x = mixed + head * (ROPE + RANK) + ROPE
    stride = heads * (ROPE + RANK)
    total = _tile(x, weight, rows, out, count, RANK, VALUE, stride, ROWS, OUTS, INNER)
    to = y + rows.to(tl.int64)[:, None] * (heads * VALUE) + head * VALUE + out[None, :]
    mask = (rows < count)[:, None] & (out < VALUE)[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=mask)


def absorb(
    q: torch.Tensor,
    latent: torch.Tensor,
    rotary: torch.Tensor,
    spec: LatentSpec,
    packing: ExpertTable,
    *,
    few: bool,
) -> torch.Tensor:
    """Compute `kernels.latent.absorb`; `packing`: a dense matrix [rank, plain] of each head. `few`:
    with tiles of few rows."""
    count, rows = len(q), 16 if few else 64
    y = torch.empty(count, (spec.heads + 1) * spec.size, dtype=q.dtype, device=q.device)
    grid = triton.cdiv(count, rows), triton.cdiv(spec.rank, OUTS), spec.heads + 1
    _absorb_kernel[grid](
        q,
        latent,
        rotary,
        packing.data,
        y,
        count,
        spec.heads,
        q.stride(0),
        latent.stride(0),
        rotary.stride(0),
        RANK=spec.rank,
        PLAIN=spec.plain_size,
        ROPE=spec.rope_size,
        ROPE_PADDED=triton.next_power_of_2(spec.rope_size),
        ROWS=rows,
        OUTS=OUTS,
        INNER=INNER,
        num_warps=4,
        num_stages=3,
    )
    return y


def unpack(
    mixed: torch.Tensor, spec: LatentSpec, unpacking: ExpertTable, *, few: bool
) -> torch.Tensor:
    """Compute `kernels.latent.unpack`; `unpacking`: a dense matrix [V, rank] of each head."""
    count, rows = len(mixed), 16 if few else 64
    y = torch.empty(count, spec.heads * spec.value_size, dtype=mixed.dtype, device=mixed.device)
    grid = triton.cdiv(count, rows), triton.cdiv(spec.value_size, OUTS), spec.heads
    assert mixed.is_contiguous()
    _unpack_kernel[grid](
        mixed,
        unpacking.data,
        y,
        count,
        spec.heads,
        RANK=spec.rank,
        ROPE=spec.rope_size,
        VALUE=spec.value_size,
        ROWS=rows,
        OUTS=OUTS,
        INNER=INNER,
        num_warps=4,
        num_stages=3,
    )
    return y
