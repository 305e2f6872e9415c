"""Packed codes as the operand of a matrix instruction, four at a time, without a conversion.

Arithmetic. A conversion from an integer runs at an eighth of the rate of other instructions, so
none is made: a code is put into the low bits of a number whose exponent makes them count ones. In
bf16 0x4300 is 128 and its last bit one: 0x4300 | code is 128 + code, exactly, for codes of up to
seven bits; in fp16 0x6400 | code is 1024 + code for up to ten. `prmt` puts two codes below two such
exponents at once, so four codes cost one `and`, at times a shift, and two `prmt`: 0.75 to 1.4
instructions a weight. Codes of 8 bits are, in bf16, 128 + low nibble and 2048 + 16 · high nibble:
two operands, both exact. Numbers of e2m1 are looked up, four upper and four lower bytes at once,
and have no excess. The excess is the same for every code and is subtracted after the product,
as that number times the sum of the inputs.

Sources: the exponent trick of fast int4 kernels (FasterTransformer, Marlin); the order of codes and
everything else is ours.

The interpreter has no assembler: there the same numbers are made by arithmetic, and
`tests/kernels_triton/test_unpack.py` runs the assembler line by line against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .support import INTERPRET

NONE, BF16, FP16 = 0, 0x43, 0x64
"""Upper byte of the number that codes are put into; NONE: codes become fp32 as they are."""
E2M1 = 1
"""In place of a width in bits: numbers of four bits (sign, two of exponent, one of fraction)."""
_E2M1 = tl.constexpr(E2M1)
_LEVELS = {
    0x43: (0x3F3F3F00, 0x40404040, 0xC0800000, 0xC0804000),
    0x64: (0x3E3C3800, 0x46444240, 0, 0),
}
"""Upper, then lower bytes of 0, 0.5, 1, 1.5 | 2, 3, 4, 6 in bf16 and in fp16."""


CHUNK = 128
"""Values of a chunk; groups are at most this large and divide it."""
BYTES = {E2M1: 64, 4: 64, 5: 80, 6: 96, 8: 128}
"""Bytes of one chunk of one row."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Form of a packed weight and of its codes in registers: a constant of kernels."""

    bits: int
    group: int
    zero: int | None
    magic: int

    @property
    def bytes(self) -> int:
        """Bytes of one chunk of one row."""
        return BYTES[self.bits]

    @property
    def planes(self) -> int:
        """Words of scales that a chunk of one row has."""
        return CHUNK // self.group if self.zero is None else max(1, CHUNK // self.group // 2)


@triton.constexpr_function
def added(bits: int, magic: int) -> int:
    """Return the excess of every code of a product."""
    if bits == 1:
        return 0
    if magic == 0x43:
        return 128 + (2048 if bits == 8 else 0)
    return 1024 if magic == 0x64 else 0


@triton.constexpr_function
def unpack_step(packing: Packing) -> int:
    """Return the values of a chunk that are unpacked at a time, by one load of their bytes; with
    high bits in planes, a plane's width."""
    return 32 if packing.bits in (5, 6) else min(max(packing.group, 32), 64)


@triton.constexpr_function
def spell(bits: int, at: int, magic: int, high: bool) -> str:
    """Spell PTX: four bytes $2 (and their high bits in $3, or $3 and $4) → four halves.

    `at`: the first of their values in the chunk, a multiple of the step. `high`: the upper nibble
    of an 8-bit code.
    """
    if bits == 1:
        text: str = _spell_numbers(at >= 64, magic)
        return text
    lines = ["{ .reg .b32 t, u, v; mov.b32 t, $2;"]
    upper = high if bits == 8 else at >= 64
    if upper:
        lines.append("shr.u32 t, t, 4;")
    if bits != 8 or magic == 0x43:
        lines.append("and.b32 t, t, 0x0f0f0f0f;")
    if bits == 5:
        # Bit at / 16 of $3 or the next one of $4, the other being zero, to bit 4 of each byte.
        left = 4 - at // 16
        lines.append(f"shf.l.wrap.b32 u, $3, $3, {left % 32}; shf.l.wrap.b32 v, $4, $4, ")
        lines.append(f"{(left - 1) % 32}; or.b32 u, u, v;")
        lines.append("and.b32 u, u, 0x10101010; or.b32 t, t, u;")
    if bits == 6:
        left = 4 - 2 * (at // 32)
        lines.append(f"shf.l.wrap.b32 u, $3, $3, {left % 32};")
        lines.append("and.b32 u, u, 0x30303030; or.b32 t, t, u;")
    # 2048 + 16 · nibble, where it is the upper one.
    exponent = 0x45 if high and magic == 0x43 else magic
    exponents = f"0x{exponent * 0x01010101:08x}"
    lines.append(f"prmt.b32 $0, t, {exponents}, 0x4140; prmt.b32 $1, t, {exponents}, 0x4342; }}")
    return " ".join(lines)


@triton.constexpr_function
def _spell_numbers(upper: bool, magic: int) -> str:
    """Spell `spell` of E2M1: three bits of each nibble choose a byte of eight, the fourth is the
    sign."""
    first, second, low, next_low = (f"0x{word:08x}" for word in _LEVELS[magic])
    lines = ["{ .reg .b32 t, u, v, h;"]
    lines.append("shr.u32 t, $2, 4; mov.b32 v, $2;" if upper else "mov.b32 t, $2; shl.b32 v, t, 4;")
    lines.append("and.b32 t, t, 0x07070707; shr.u32 u, t, 4; or.b32 t, t, u;")
    # Four choices in the lower half of a word.
    lines.append("prmt.b32 t, t, 0, 0x4420; and.b32 v, v, 0x80808080;")
    lines.append(f"prmt.b32 h, {first}, {second}, t; or.b32 h, h, v;")
    if magic == 0x64:
        lines.append("prmt.b32 $0, h, 0, 0x1404; prmt.b32 $1, h, 0, 0x3424; }")
    else:
        lines.append(f"prmt.b32 u, {low}, {next_low}, t;")
        lines.append("prmt.b32 $0, u, h, 0x5140; prmt.b32 $1, u, h, 0x7362; }")
    return " ".join(lines)


@triton.constexpr_function
def spell_all(value: int, magic: int) -> str:
    """Spell PTX: four times the integer `value`, whatever the four bytes are."""
    exponent = abs(value).bit_length() - 1
    bias, digits = (127, 7) if magic == 0x43 else (15, 10)
    fraction = (abs(value) << 16 >> exponent) - (1 << 16) >> (16 - digits)
    bits = (value < 0) << 15 | (exponent + bias) << digits | fraction
    return f"mov.b32 $0, 0x{bits:04x}{bits:04x}; mov.b32 $1, 0x{bits:04x}{bits:04x};"


@triton.jit
def unpack(
    like,
    byte,
    plane,
    second,
    AT: tl.constexpr,
    BITS: tl.constexpr,
    MAGIC: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Convert byte [OUTS, STEP] uint8 to excess + code in the type of `like`; see `packed` for the
    layout.

    `plane`: the bytes of the high bits, if there are any; for 5-bit codes those of the first 16
    values, zeros for the others, and `second` the other way round. HIGH: the upper nibbles of 8-bit
    codes in bf16; the lower ones otherwise.
    """
    if MAGIC == 0 or INTERPRET:
        code = byte.to(tl.int32)
        if BITS == 8:
            if MAGIC == 0x43:
                code = (code & 0xF0) + 2048 if HIGH else (code & 15) + 128
            else:
                code += added(BITS, MAGIC)
        else:
            code = (code >> (4 * (AT // 64))) & 15
            if BITS == 5:
                code |= ((plane.to(tl.int32) >> (AT // 16)) & 1) << 4
                code |= ((second.to(tl.int32) >> (AT // 16 + 1)) & 1) << 4
            if BITS == 6:
                code |= ((plane.to(tl.int32) >> (2 * (AT // 32))) & 3) << 4
            code += added(BITS, MAGIC)
        number = code.to(tl.float32)
        if BITS == _E2M1:
            size = code & 7
            number = tl.exp2((size >> 1).to(tl.float32) - 1.0) * (1.0 + 0.5 * (size & 1))
            number = tl.where(size < 2, 0.5 * size, number) * (1.0 - 0.25 * (code & 8))
        found = number.to(like.dtype)
    elif BITS == 5:
        found = tl.inline_asm_elementwise(
            spell(BITS, AT, MAGIC, HIGH),
            "=r,=r,r,r,r",
            [byte, plane, second],
            like.dtype,
            is_pure=True,
            pack=4,
        )
    elif BITS == 6:
        found = tl.inline_asm_elementwise(
            spell(BITS, AT, MAGIC, HIGH),
            "=r,=r,r,r",
            [byte, plane],
            like.dtype,
            is_pure=True,
            pack=4,
        )
    else:
        found = tl.inline_asm_elementwise(
            spell(BITS, AT, MAGIC, HIGH), "=r,=r,r", [byte], like.dtype, is_pure=True, pack=4
        )
    return found


@triton.jit
def fill(like, byte, VALUE: tl.constexpr, MAGIC: tl.constexpr):
    """Return VALUE in the shape, and on a device in the registers, of `unpack`'s result for
    `byte`."""
    if MAGIC == 0 or INTERPRET:
        found = tl.full(byte.shape, VALUE, tl.float32).to(like.dtype)
    else:
        found = tl.inline_asm_elementwise(
            spell_all(VALUE, MAGIC), "=r,=r,r", [byte], like.dtype, is_pure=True, pack=4
        )
    return found


@triton.jit
def halves(pairs):
    """Return the lower and the upper fp16 number of int32, as fp32."""
    if INTERPRET:
        low, high = first_half(pairs), second_half(pairs)
    else:
        # As shifts they would be an instruction more each.
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }",
            "=r,=r,r",
            [pairs],
            (tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return low, high


@triton.jit
def first_half(pair):
    """Return the lower fp16 number of int32, as fp32."""
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def second_half(pair):
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
