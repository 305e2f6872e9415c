"""8-bit codes: of the row that a kernel just computed, while it is still in registers; and back.

A following 8-bit product needs its input as codes with one scale per row. Writing them from the
norm or the gate instead of a separate kernel saves a read and a write of the activations (4 bytes
an element) and a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .support import INTERPRET, matrix_product

CODES = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
"""Output formats: dtype and largest magnitude."""
HIGHEST = tl.constexpr(65504.0)
"""Largest fp16."""
LIFT = tl.constexpr(256.0)
"""Factor on the scales of V if weights of attention are fp16, whose smallest number is 6e-8; it is
removed at the end."""
LIFT_LOG2 = tl.constexpr(8.0)


@triton.jit
def code_product(a, b):
    """Multiply a [ROWS, K] · b [K, OUTS] of e4m3 codes, in fp32.

    Hopper multiplies e4m3 by warpgroups alone, 64 of the first side at a time; for anything smaller
    the compiler widens both sides, a conversion for every two codes. So with few rows the outputs
    are the first side. Tensor cores keep some 14 bits of a sum of codes: a caller that adds these
    products turn by turn adds in fp32.
    """
    ROWS: tl.constexpr = a.shape[0]
    OUTS: tl.constexpr = b.shape[1]
    if ROWS < 64:
        zeros = tl.zeros([OUTS, ROWS], tl.float32)
        found = tl.trans(matrix_product(tl.trans(b), tl.trans(a), zeros))
    else:
        found = matrix_product(a, b, tl.zeros([ROWS, OUTS], tl.float32))
    return found


@triton.jit
def to_codes(scaled, kind: tl.constexpr, HIGH: tl.constexpr):
    """Convert scaled fp32 within ±HIGH, except for rounding → int8 or fp8 of type `kind`,
    nearest."""
    scaled = tl.minimum(tl.maximum(scaled, -HIGH), HIGH)
    if kind == tl.int8:
        # Half away from zero; the interpreter and every target agree on floor.
        return tl.where(scaled < 0, -tl.floor(0.5 - scaled), tl.floor(scaled + 0.5)).to(kind)
    if INTERPRET:
        # The interpreter drops the carry of a mantissa that rounds up to the next binade:
        # hand it values that are on the grid of e4m3 already.
        exponent = tl.maximum(tl.floor(tl.log2(tl.maximum(tl.abs(scaled), 1e-9))), -6.0)
        step = tl.exp2(exponent - 3.0)
        scaled = tl.floor(scaled / step + 0.5) * step
    return scaled.to(kind)


@triton.jit
def store_row(codes, scales, row, columns, values, mask, width, HIGH: tl.constexpr):
    """Store values [columns] fp32 of one row → codes and the row's scale (absolute maximum /
    HIGH)."""
    peak = tl.max(tl.where(mask, tl.abs(values), 0.0), 0)
    scale = tl.maximum(peak / HIGH, 1e-30)
    coded = to_codes(values / scale, codes.dtype.element_ty, HIGH)
    tl.store(codes + row * width + columns, coded, mask=mask)
    tl.store(scales + row, scale)


@triton.jit
def store_groups(
    codes,
    scales,
    row,
    first,
    values,
    width,
    groups,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Store values [COLUMNS] fp32 from column `first` on → codes and one scale per GROUP
    columns."""
    group = first // GROUP + tl.arange(0, COLUMNS // GROUP)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = columns < width
    tiled = tl.where(mask, tl.reshape(values, [COLUMNS // GROUP, GROUP]), 0.0)
    scale = tl.maximum(tl.max(tl.abs(tiled), 1) / HIGH, 1e-30)
    coded = to_codes(tiled / scale[:, None], codes.dtype.element_ty, HIGH)
    tl.store(codes + row * width + columns, coded, mask=mask)
    tl.store(scales + row * groups + group, scale, mask=group < groups)


@triton.jit
def scale_query(query, scale):
    """Return query · scale as fp16, for keys that are codes."""
    scaled = query.to(tl.float32) * scale
    return tl.minimum(tl.maximum(scaled, -HIGHEST), HIGHEST).to(tl.float16)


@triton.jit
def two_terms(rows):
    """Split fp32 rows [R, K] → e4m3 [K, 2 · R], the second side of a product of codes, and fp32
    [R], the factor of its sums: see `join_terms`.

    Column r is row r times a power of two, which takes its largest number to 128 or above, below
    256; column R + r is 16 times what that leaves. Both together have eight digits, as bf16 has.
    """
    peak = tl.maximum(tl.max(tl.abs(rows), 1), 7.9e-31)  # 2 to the power -100.
    exponent = peak.to(tl.int32, bitcast=True) & 0x7F800000
    # As bits: exponents are added where powers of two are multiplied, none is rounded.
    unit = ((254 << 23) - exponent + (7 << 23)).to(tl.float32, bitcast=True)
    scaled = rows * unit[:, None]
    return pair_terms(scaled), (exponent - (7 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def pair_terms(scaled):
    """Split fp32 [R, K], at most 448 → e4m3 [K, 2 · R]: see `two_terms`."""
    high = to_codes(scaled, tl.float8e4nv, 448.0)
    rest = to_codes((scaled - high.to(tl.float32)) * 16.0, tl.float8e4nv, 448.0)
    both = tl.permute(tl.join(tl.trans(high), tl.trans(rest)), [0, 2, 1])
    return tl.reshape(both, [scaled.shape[1], 2 * scaled.shape[0]])


@triton.jit
def join_terms(sums):
    """Add the sums [T, 2 · R] of a product with `two_terms` → [T, R]; its factor is not in them."""
    T: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1] // 2
    first, rest = tl.split(tl.permute(tl.reshape(sums, [T, 2, ROWS]), [0, 2, 1]))
    return first + rest * 0.0625


@triton.jit
def from_codes(codes, INNER: tl.constexpr = False):
    """Convert int8 or e4m3 codes to the same numbers in fp16, which holds all of both exactly.

    It is assembler, four codes a word, for two reasons (counted in the machine code, sm_90). To
    bf16 there is no conversion but through fp16, and its second half (F2F) runs at an eighth of the
    rate. And a widening that the compiler recognises moves after the exchange of operands between
    threads, which is byte by byte for 8-bit numbers. Assembler that must not be duplicated stays
    before it, and `ldmatrix` brings the 16-bit operands.

    INNER: neighbours in memory are neighbours along the sum (keys; not values, whose sum goes over
    tokens). Then the exchange brings codes as words, and moving the widening after it saves a write
    and half a read of shared memory: as pure assembler the compiler does that.
    """
    if INTERPRET:
        return codes.to(tl.float32).to(tl.float16)
    if codes.dtype == tl.int8:
        # 0x6400 + n is 1024 + n in fp16 for n below 1024; codes + 128 are.
        return tl.inline_asm_elementwise(
            """{ .reg .b32 high, base;
            xor.b32 high, $2, 0x80808080;
            mov.b32 base, 0x64806480;
            prmt.b32 $0, high, 0x64646464, 0x4140;
            prmt.b32 $1, high, 0x64646464, 0x4342;
            sub.rn.f16x2 $0, $0, base;
            sub.rn.f16x2 $1, $1, base; }""",
            "=&r,=&r,r",
            [codes],
            dtype=tl.float16,
            is_pure=INNER,
            pack=4,
        )
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high; }""",
        "=&r,=&r,r",
        [codes],
        dtype=tl.float16,
        is_pure=INNER,
        pack=4,
    )
