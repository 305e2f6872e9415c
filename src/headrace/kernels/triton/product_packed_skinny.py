"""Products of up to 16 rows with packed weights, at a third of `product_packed`'s instructions.

Arithmetic. At 4 bits a weight is 0.53 to 0.63 bytes with its scales. An H200 brings 21 bytes a
cycle to every multiprocessor, which issues 128 thread instructions in that time. So there is room
for 3.9 instructions a weight in groups of 32, 3.3 in groups of 128 (H100: 5.5 and 4.7; at most half
of them integer ones). `product_packed` has 8.2 and 7.5 in its loop and converts every code, at an
eighth of the rate, so instructions limit it to half the bandwidth. Here (counted in the machine
code, sm_90, up to 8 rows) it is 3.2 and 2.3:

* codes are made operands without a conversion, see `unpack`: 0.9;
* scales are multiplied onto the sums of a group, not onto its weights: the weights are the
  operand with 16 rows, the activations the one with 8 columns, so a tile of 16 outputs and 32
  inputs, 16 weights a thread, has 4 sums a thread. The products are exact in fp32 that way;
* the excess of `unpack`, and the offset, are subtracted by way of the sum of the group's inputs.
  That sum comes out of the matrix unit too, as the product with a row of ones, in the very
  registers where it is needed; where all groups have one zero, the row holds minus that number and
  the sums begin with its product: no instruction at all;
* two tiles of 16 outputs a warp share the inputs and those sums.

Two warps per program keep Triton from using warpgroup instructions, which have at least 64 rows and
would make the accumulators wait for every group. So programs are small, eight on a multiprocessor.
The input is split; the last program to finish adds the parts in order, then does the same as
`product_skinny`: the gate, the bias, the residual in fp32. A preceding norm is a separate kernel:
its gain costs an instruction per input, eight rows and warp, a third more.

Sources: scales on the sums of groups as in Machete's and llama.cpp's kernels of integers; the
parts' order as in `product_skinny`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..weights import TiledWeight
from .gated import activate
from .packed import packing_of
from .split import count_splits, join_parts
from .support import matrix_product
from .unpack import added, fill, halves, unpack, unpack_step


@dataclass(frozen=True, slots=True)
class PackedSkinnyConfig:
    """Cut of a launch; `outs` and `programs` are part of the result's rounding."""

    outs: int = 64
    warps: int = 2
    stages: int = 4
    programs: int = 528
    """The input is split until there are about this many programs."""
    rows: int = 8
    """Rows of a tile, 8 or 16; at least those of the step."""
    serves: bool = True
    """Whether this kernel serves instead of `product_packed`."""


@triton.jit
def _multiply(sums, byte, plane, second, x, AT: tl.constexpr, PACKING: tl.constexpr):
    """Add the codes of one step, with their excess, · x [STEP, ROWS] to sums [OUTS, ROWS]."""
    low = unpack(x, byte, plane, second, AT, PACKING.bits, PACKING.magic, False)
    sums = matrix_product(low, x, sums)
    if PACKING.bits == 8 and PACKING.magic == 0x43:
        high = unpack(x, byte, plane, second, AT, PACKING.bits, PACKING.magic, True)
        sums = matrix_product(high, x, sums)
    return sums


@triton.jit
def _scaled(total, sums, inputs, pairs, outs, GROUP_AT: tl.constexpr, PACKING: tl.constexpr):
    """Add the sums of group GROUP_AT of a chunk, times its scale, to total.

    `pairs` points to the chunk's scales. `inputs` [OUTS, ROWS]: the sums of the group's inputs.
    With a zero: the number to add to `sums`, unless they began with it.
    """
    if PACKING.zero is None:
        scale, offset = halves(tl.load(pairs + GROUP_AT * outs))
        total += inputs * (offset - added(PACKING.bits, PACKING.magic) * scale)[:, None]
    else:
        scale, next_scale = halves(tl.load(pairs + GROUP_AT // 2 * outs))
        if GROUP_AT % 2:
            scale = next_scale
        if PACKING.group > unpack_step(PACKING):
            sums += inputs
    return total + sums * scale[:, None]


@triton.jit
def sum_groups(
    x_at,
    row_mask,
    line,
    pair_at,
    first,
    last,
    width,
    stride,
    outs,
    PACKING: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return sums [OUTS, ROWS] of the chunks `first` to `last` of w · xᵀ without the outputs'
    factors, and with a GATE those of up, `outs` rows further on.

    line [OUTS, 1] points to the codes of chunk `first`, pair_at [OUTS] to its scales, x_at
    [STEP, ROWS] to its inputs; `stride` are all rows of the weight.
    """
    STEP: tl.constexpr = unpack_step(PACKING)
    EXTRA: tl.constexpr = added(PACKING.bits, PACKING.magic)
    place = tl.arange(0, STEP)
    code_at = line + place[None, :]
    plane_at = line + 64 + (place % (16 if PACKING.bits == 5 else 32))[None, :]
    in_first = (place < 16)[None, :]
    up = outs.to(tl.int64)
    total = tl.zeros([OUTS, ROWS], tl.float32)
    other = tl.zeros([OUTS, ROWS], tl.float32)
    none = tl.zeros([OUTS, ROWS], tl.float32)
    for chunk in tl.range(first, last, num_stages=STAGES):
        plane = place
        second = place
        up_plane = place
        up_second = place
        # A mask over columns must be a load's: where a tile is computed from a range, the compiler
        # sends it through shared memory.
        if PACKING.bits == 5:
            plane = tl.load(plane_at, mask=in_first, other=0)
            second = tl.load(plane_at, mask=~in_first, other=0)
            if GATE != "":
                up_plane = tl.load(plane_at + up * PACKING.bytes, mask=in_first, other=0)
                up_second = tl.load(plane_at + up * PACKING.bytes, mask=~in_first, other=0)
        if PACKING.bits == 6:
            plane = tl.load(plane_at)
            if GATE != "":
                up_plane = tl.load(plane_at + up * PACKING.bytes)
        for step in tl.static_range(128 // STEP):
            at_code = step * STEP if PACKING.bits == 8 else step * STEP % 64
            byte = tl.load(code_at + at_code)
            if GATE != "":
                up_byte = tl.load(code_at + up * PACKING.bytes + at_code)
            # Groups of 16 are two to a step: the inputs of the other are zeros in each one's turn.
            for half in tl.static_range(2 if PACKING.group == 16 else 1):
                mask = row_mask[None, :]
                if not EVEN:
                    mask = mask & (place < width - chunk * 128 - step * STEP)[:, None]
                if PACKING.group == 16:
                    mask = mask & (place // 16 == half)[:, None]
                given = tl.load(x_at + step * STEP, mask=mask, other=0.0)
                if PACKING.group == 16 or step * STEP % PACKING.group == 0:
                    inputs = none
                # The excess of all codes, or just the inputs' sum if groups have offsets.
                if PACKING.zero is None:
                    inputs = matrix_product(fill(given, byte, 1, PACKING.magic), given, inputs)
                elif EXTRA + PACKING.zero > 0:
                    inputs = matrix_product(
                        fill(given, byte, -(EXTRA + PACKING.zero), PACKING.magic), given, inputs
                    )
                if PACKING.group == 16 or step * STEP % PACKING.group == 0:
                    sums = none
                    up_sums = none
                    if PACKING.zero is not None and PACKING.group <= STEP:
                        sums = inputs
                        up_sums = inputs
                sums = _multiply(sums, byte, plane, second, given, step * STEP, PACKING)
                if GATE != "":
                    up_sums = _multiply(
                        up_sums, up_byte, up_plane, up_second, given, step * STEP, PACKING
                    )
                if PACKING.group == 16 or (step + 1) * STEP % PACKING.group == 0:
                    total = _scaled(
                        total,
                        sums,
                        inputs,
                        pair_at,
                        stride,
                        (step * STEP + half * 16) // PACKING.group,
                        PACKING,
                    )
                    if GATE != "":
                        other = _scaled(
                            other,
                            up_sums,
                            inputs,
                            pair_at + up,
                            stride,
                            (step * STEP + half * 16) // PACKING.group,
                            PACKING,
                        )
        code_at += stride.to(tl.int64) * PACKING.bytes
        plane_at += stride.to(tl.int64) * PACKING.bytes
        pair_at += stride * PACKING.planes
        x_at += 128
    return total, other


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    codes,
    pairs,
    factors,
    bias,
    residual,
    y,
    partial,
    tickets,
    rows,
    width,
    outs,
    chunks,
    x_stride,
    residual_stride,
    y_stride,
    per_split,
    PACKING: tl.constexpr,
    GATE: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply a tile. GATE: the activation, or "": the weight is gate over up, with `outs` outputs
    each.

    EVEN: the input is whole chunks.
    """
    STEP: tl.constexpr = unpack_step(PACKING)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    # Rows of the weight: twice as many with a gate.
    stride = outs * 2 if GATE != "" else outs
    first = split * per_split
    last = tl.minimum(first + per_split, chunks)
    row = tl.arange(0, ROWS)
    out = tile * OUTS + tl.arange(0, OUTS)
    # The last output again rather than a mask: it is not stored.
    real = tl.minimum(out, outs - 1)
    place = tl.arange(0, STEP)
    row_mask = row < rows
    x_at = x + row.to(tl.int64)[None, :] * x_stride + place[:, None] + first * 128
    total, other = sum_groups(
        x_at,
        row_mask,
        codes + (first.to(tl.int64) * stride + real)[:, None] * PACKING.bytes,
        pairs + first.to(tl.int64) * PACKING.planes * stride + real,
        first,
        last,
        width,
        stride,
        outs,
        PACKING,
        GATE,
        EVEN,
        ROWS,
        OUTS,
        STAGES,
    )
    mask = (out < outs)[:, None] & row_mask[None, :]
    last_part = True
    if SPLITS > 1:
        total, other, last_part = join_parts(
            total,
            other,
            row_mask,
            partial,
            tickets,
            tile,
            tl.num_programs(0),
            split,
            SPLITS,
            GATE,
            OUTS,
            ROWS,
        )
    if last_part:
        out_mask = out < outs
        total *= tl.load(factors + out, mask=out_mask, other=0.0)[:, None]
        if GATE != "":
            other *= tl.load(factors + outs + out, mask=out_mask, other=0.0)[:, None]
            total = activate(total, other, GATE)
        if bias is not None:
            total += tl.load(bias + out, mask=out_mask, other=0.0).to(tl.float32)[:, None]
        if residual is not None:
            at = row.to(tl.int64)[None, :] * residual_stride + out[:, None]
            total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        at = row.to(tl.int64)[None, :] * y_stride + out[:, None]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=mask)


def product_packed_skinny(
    x: torch.Tensor,
    weight: TiledWeight,
    bias: torch.Tensor | None,
    config: PackedSkinnyConfig,
    tickets: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str = "",
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x [N, in] · weightᵀ + bias + residual → [N, out] in `dtype` (or x's), or into `y`.

    N is at most `config.rows`. `activation`: the weight is gate over up [2 · I, in] →
    act(gate) · up [N, I]. `tickets`: see `split.make_tickets`.
    """
    rows, width = x.shape
    assert rows <= config.rows, f"{rows} rows"
    assert width == weight.shape[1]
    outs = weight.shape[0] // 2 if activation else weight.shape[0]
    assert x.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    if y is None:
        y = torch.empty(rows, outs, dtype=dtype or x.dtype, device=x.device)
    assert y.stride(1) == 1
    chunks = weight.codes.shape[0]
    # Sixteen rows of two sums each would not fit into the registers.
    tile = config.outs // 2 if activation and config.rows > 8 else config.outs
    tiles = triton.cdiv(outs, tile)
    per_split = triton.cdiv(chunks, count_splits(config.programs, outs, tile, chunks))
    splits = triton.cdiv(chunks, per_split)
    partial = y
    if splits > 1:
        assert tiles <= len(tickets)
        cell = (2 if activation else 1) * tile * config.rows
        partial = torch.empty(splits * tiles * cell, dtype=torch.float32, device=x.device)
    _product_kernel[(tiles, splits)](
        x,
        weight.codes,
        weight.pairs,
        weight.factors,
        bias,
        residual,
        y,
        partial,
        tickets,
        rows,
        width,
        outs,
        chunks,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        y.stride(0),
        per_split,
        PACKING=packing_of(weight, x.dtype),
        GATE=activation,
        SPLITS=splits,
        EVEN=width % 128 == 0,
        ROWS=config.rows,
        OUTS=tile,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return y
