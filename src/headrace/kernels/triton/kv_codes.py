"""KV in codes beyond one scale a head: keys without their large biases, values in four bits.

A bias that keys are kept without (`key_bias`) is added to the score as q · R_p b. For each plane of
the rotation with a bias that is two multiply-adds an element, in addition to a tile's product; a
layer without large biases has none. Values in four bits (`value_codes`) are levels of a rotated
head: two of a byte are looked up at once. Products are of levels in fp16, which holds them exactly;
the sums over tokens are turned back once, after the loop.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl

from ..arrays import tensor
from ..operators import KvLayer
from ..value_codes import DEVIATION, MAGNITUDES
from .support import INTERPRET, matrix_product

_STEPS = tl.constexpr(tuple(b - a for a, b in pairwise(MAGNITUDES)))
_LIMITS = tl.constexpr(tuple((a + b) / 2 for a, b in pairwise(MAGNITUDES)))
_LEAST = tl.constexpr(MAGNITUDES[0])
_DEVIATION = tl.constexpr(DEVIATION)


def _word(levels: tuple[float, ...]) -> str:
    """Return four levels, with 128 added, as the bytes of a word."""
    return f"0x{sum(int(x + 128) << 8 * i for i, x in enumerate(levels)):08x}"


_BELOW = tuple(-x for x in MAGNITUDES[::-1])
_TWO_BYTES = f"""
prmt.b32 above, {_word(MAGNITUDES[:4])}, {_word(MAGNITUDES[4:])}, at;
prmt.b32 below, {_word(_BELOW[:4])}, {_word(_BELOW[4:])}, at;
prmt.b32 which, 0x0000ff00, 0, sign;
lop3.b32 above, which, above, below, 0xca;
prmt.b32 low%, above, 0x64646464, 0x4240;
prmt.b32 high%, above, 0x64646464, 0x4341;"""
LOOK_UP = f"""{{ .reg .b32 at, sign, above, below, which, low0, low1, high0, high1;
and.b32 at, $4, 0x77777777;
shr.u32 sign, $4, 3; and.b32 sign, sign, 0x11111111;{_TWO_BYTES.replace("%", "0")}
shr.u32 at, at, 16; shr.u32 sign, sign, 16;{_TWO_BYTES.replace("%", "1")}
mov.b32 at, 0x64806480;
sub.rn.f16x2 $0, low0, at; sub.rn.f16x2 $1, low1, at;
sub.rn.f16x2 $2, high0, at; sub.rn.f16x2 $3, high1, at; }}"""
"""PTX: four bytes of two codes each ($4) → the levels of their low halves ($0, $1) and of their
high ones, in fp16. A nibble chooses a byte of eight by its lower three bits, among levels above
zero and among those below; its fourth says which holds. 0x6400 + n is 1024 + n."""
ASSEMBLED = tl.constexpr(LOOK_UP)


@triton.jit
def levels(bytes):
    """Look up uint8 [T, H] → the levels of both halves of each byte, side by side: fp16 [T, 2 ·
    H]."""
    if INTERPRET:
        code = bytes.to(tl.int32)
        low, high = _level(code & 15), _level(code >> 4)
    else:
        low, high = tl.inline_asm_elementwise(
            ASSEMBLED,
            "=r,=r,=r,=r,r",
            [bytes],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return tl.reshape(tl.join(low, high), [bytes.shape[0], 2 * bytes.shape[1]])


@triton.jit
def _level(code):
    place = tl.where(code < 8, 7 - code, code - 8)
    level = tl.full(code.shape, _LEAST, tl.float32)
    for i in tl.static_range(7):
        level += tl.where(place > i, _STEPS[i], 0.0)
    return tl.where(code < 8, -level, level).to(tl.float16)


@triton.jit
def turn_back(output):
    """Turn means of rotated values fp32 [R, E], with columns as in `levels`, into means of values.

    The matrix of ones and minus ones is made in registers: the sign of row i and column j is the
    parity of i & j. A mean is no larger than a value here, and fp16 has more digits than a result.
    """
    WIDTH: tl.constexpr = output.shape[1]
    at = tl.arange(0, WIDTH)
    row = at // 2 + at % 2 * (WIDTH // 2)
    bits = row[:, None] & at[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits = (bits ^ (bits >> 1)) & 1
    signs = (1 - 2 * bits).to(tl.float32)
    if not INTERPRET:
        output = output.to(tl.float16)
        signs = signs.to(tl.float16)
    zeros = tl.zeros([output.shape[0], WIDTH], tl.float32)
    return matrix_product(output, signs, zeros)


@triton.jit
def quantise_levels(low, high, SIZE: tl.constexpr):
    """Quantise both halves of the heads fp32 [HEADS, SIZE / 2] → bytes of codes like them, and the
    scale of the levels [HEADS], as `value_codes.encode` does."""
    low = _turned(low)
    high = _turned(high)
    first, second = low + high, low - high
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    unit = tl.sqrt_rn(tl.div_rn(squares, SIZE * 1.0)) / _DEVIATION
    low_code, low_level = _nearest(first, unit)
    high_code, high_level = _nearest(second, unit)
    along = tl.sum(first * low_level, 1) + tl.sum(second * high_level, 1)
    length = tl.sum(low_level * low_level, 1) + tl.sum(high_level * high_level, 1)
    return (low_code | high_code << 4).to(tl.uint8), along / (length * SIZE)


@triton.jit
def _nearest(x, unit):
    place = tl.zeros(x.shape, tl.int32)
    level = tl.full(x.shape, _LEAST, tl.float32)
    for i in tl.static_range(7):
        over = tl.abs(x) > (unit * _LIMITS[i])[:, None]
        place += over.to(tl.int32)
        level += tl.where(over, _STEPS[i], 0.0)
    return tl.where(x < 0, 7 - place, 8 + place), tl.where(x < 0, -level, level)


@triton.jit
def _turned(x):
    """Multiply x [HEADS, n] by the matrix of ones and minus ones; n is a power of two."""
    HEADS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    for step in tl.static_range(8):
        if (2 << step) <= WIDTH:
            pairs = tl.reshape(x, [HEADS, WIDTH // (2 << step), 2, 1 << step])
            first, second = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
            joined = tl.join(first + second, first - second)
            x = tl.reshape(tl.permute(joined, [0, 1, 3, 2]), [HEADS, WIDTH])
    return x


@triton.jit
def leave_out(low, high, biases, head, columns, real, COUNT: tl.constexpr):
    """Remove from both halves of keys [HEADS, columns] the biases of their heads `head`."""
    for number in tl.static_range(COUNT):
        line = biases + (head * COUNT + number) * 3
        place = tl.load(line, mask=real, other=-1.0)[:, None] == columns[None, :]
        low -= tl.where(place, tl.load(line + 1, mask=real, other=0.0)[:, None], 0.0)
        high -= tl.where(place, tl.load(line + 2, mask=real, other=0.0)[:, None], 0.0)
    return low, high


@triton.jit
def add_biases(
    scores,
    query_at,
    owned,
    factor,
    biases,
    cos,
    sin,
    places,
    seen,
    HALF: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Add factor · q · R_p b to scores [ROWS, TILE]. `biases` [COUNT, 3] fp32 are this head's, see
    `KeyBias.planes`; query_at [ROWS] is the address of each row, cos and sin are [positions, HALF].
    """
    for number in tl.static_range(COUNT):
        line = biases + 3 * number
        low = tl.load(line).to(tl.int32)
        x = tl.load(line + 1) * factor
        y = tl.load(line + 2) * factor
        first = tl.load(query_at + low, mask=owned, other=0.0).to(tl.float32)
        second = tl.load(query_at + low + HALF, mask=owned, other=0.0).to(tl.float32)
        angle = places * HALF + low
        c = tl.load(cos + angle, mask=seen, other=0.0)
        s = tl.load(sin + angle, mask=seen, other=0.0)
        scores += (first * x + second * y)[:, None] * c[None, :]
        scores += (second * x - first * y)[:, None] * s[None, :]
    return scores


def biases_of(
    kv: KvLayer, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return a layer's arguments of `add_biases`: planes, cosines, sines, and the number of planes
    of a head. If its keys are kept whole, these are three times `other`, and 0."""
    if kv.bias is None or kv.planes is None:
        return other, other, other, 0
    rope = kv.bias.rope
    assert rope is not None, "no kernel for layers without positions"
    return tensor(kv.planes), tensor(rope.cos), tensor(rope.sin), kv.planes.shape[1]
