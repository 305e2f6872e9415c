"""The GPU's layout of a packed weight, and its making from the plain one.

Codes lie in *chunks* of 128 values along the input, chunk-major, so that the tile of any program
is one contiguous run: `codes[chunk, out, bytes]`. Within a chunk and row:

    e2m1     as 4 bits; each code is a number of four bits (`unpack.E2M1`)
    bits 4   64 bytes: byte j holds value j in its low and value j + 64 in its high nibble
    bits 5   the same 64 bytes, then 16: bit i of byte j is bit 4 of value 16 · i + j
    bits 6   the same 64 bytes, then 32: bits 2i, 2i+1 of byte j are bits 4, 5 of value 32 · i + j
    bits 8   128 bytes, one a value

so one mask or shift extracts 64 neighbouring values from 64 neighbouring bytes, without a shuffle
between threads, and no unused byte is fetched.

Scales are halves, two in a word of 32 bits: `pairs[chunk, plane, out]`, so that the outputs of a
tile are neighbours, and four bytes, the smallest asynchronous copy, are always needed:

    with offsets   plane g: scale of the chunk's group g below, its offset above
    with a zero    plane p: scale of group 2p below, of 2p + 1 above; w = (code - zero) · scale

Most formats have one zero for all groups (8 of Q4_0, 32 of Q6_K, 128 of Q8_0); fp32 scale and
offset of a group of 16 would take as many bytes as its codes. Every output has a power of two, its
`factor`, that scales its largest number to between one and two, so that no checkpoint leaves fp16's
range. A scale's relative error is at most 2⁻¹¹, compared with 2⁻⁸ for a weight in bf16. Inputs that
are not a multiple of 128 are padded with codes of scale zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from ..weights import PackedWeight, TiledWeight, Weight
from .unpack import BF16, BYTES, CHUNK, E2M1, FP16, NONE, Packing

HALF = 64
_MAGIC = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: NONE}
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitude of each code of e2m1 below 8; those from 8 on are below zero."""


def packing_of(weight: TiledWeight, dtype: torch.dtype) -> Packing:
    """Return a weight's form, with codes as operands of `dtype`."""
    return Packing(weight.bits, weight.group, weight.zero, _MAGIC[dtype])


def tile_weight(weight: PackedWeight, *, e2m1: bool = False) -> TiledWeight:
    """Convert from the plain layout ("rows": one code a byte); codes without loss, scales as
    halves. `e2m1`: a code is twice a number of e2m1, plus 16, and is kept as that number."""
    assert weight.layout == "rows"
    if e2m1:
        weight = _numbers(weight)
    # Two and three take four.
    bits = E2M1 if e2m1 else next(width for width in BYTES if width >= max(4, weight.bits))
    assert CHUNK % weight.group == 0, f"groups of {weight.group}"
    out, width = weight.shape
    codes = pad(weight.codes, (0, -width % CHUNK)).view(out, -1, CHUNK).transpose(0, 1)
    zero = _common_zero(weight)
    numbers = [weight.scales]
    if zero is None:
        assert weight.offsets is not None
        numbers.append(weight.offsets)
    factors = _factors(numbers)
    halves = [_by_chunk(each / factors[:, None], len(codes), weight.group) for each in numbers]
    if zero is not None:
        (alone,) = halves
        alone = pad(alone, (0, 0, 0, alone.shape[1] % 2))
        halves = [alone[:, 0::2], alone[:, 1::2]]
    pairs = torch.stack([each.half() for each in halves], -1).view(torch.int32).squeeze(-1)
    assert pairs.shape == (len(codes), Packing(bits, weight.group, zero, NONE).planes, out)
    return TiledWeight(
        _planes(codes, bits).contiguous(),
        pairs.contiguous(),
        factors,
        zero,
        bits,
        weight.group,
        weight.shape,
    )


def _numbers(weight: PackedWeight) -> PackedWeight:
    """Return the weight with codes of e2m1, whose zero is 0."""
    code = torch.zeros(32, dtype=torch.uint8)
    for number, twice in enumerate(_TWICE):
        code[16 - twice], code[16 + twice] = 8 + number, number
    # By index as int32: a byte as an index is a mask.
    codes = code.to(weight.codes.device)[weight.codes.int()]
    return replace(weight, codes=codes, scales=weight.scales * 2, offsets=None, bits=4)


def merge_tiled(parts: Sequence[Weight]) -> TiledWeight | None:
    """Join weights one below the other as one weight, if all are packed alike; else return None."""
    first = parts[0]
    if not isinstance(first, TiledWeight):
        return None
    tiled = [part for part in parts if isinstance(part, TiledWeight)]
    kinds = {(p.bits, p.group, p.zero, p.shape[1]) for p in tiled}
    if len(tiled) < len(parts) or len(kinds) > 1:
        return None
    return TiledWeight(
        torch.cat([part.codes for part in tiled], 1),
        torch.cat([part.pairs for part in tiled], 2),
        torch.cat([part.factors for part in tiled]),
        first.zero,
        first.bits,
        first.group,
        (sum(part.shape[0] for part in tiled), first.shape[1]),
    )


def merge_neighbours(parts: Sequence[Weight]) -> list[Weight]:
    """Join each run of weights that are packed alike: q and k, if v is of another format."""
    merged: list[Weight] = []
    for part in parts:
        joined = merge_tiled([merged[-1], part]) if merged else None
        if joined is None:
            merged.append(part)
        else:
            merged[-1] = joined
    return merged


def _common_zero(weight: PackedWeight) -> int | None:
    """Return the one code of all groups that stands for 0, if there is one that kernels can
    subtract.

    That depends on the numbers, so a weight without memory (device "meta") has none unless it has
    no offsets.
    """
    if weight.offsets is None:
        return 0
    if weight.scales.is_meta:
        return None
    scales, offsets = weight.scales.flatten().float(), weight.offsets.flatten().float()
    largest = int(scales.abs().argmax())
    scale = float(scales[largest])
    zero = round(-float(offsets[largest]) / scale) if scale else 0
    # Kernels add it to the excess of `unpack`, in bf16: eight bits, the upper ones of 2048 and
    # more.
    fits = 0 <= zero <= 128 and (weight.bits < 8 or zero % 16 == 0)
    return zero if fits and torch.equal(scales * -float(zero), offsets) else None


def _factors(numbers: list[torch.Tensor]) -> torch.Tensor:
    """Return [out] fp32, powers of two: every number [out, groups] divided by them is below 2."""
    largest = torch.stack([each.float().abs().amax(1) for each in numbers]).amax(0)
    exponents = torch.frexp(largest).exponent - 1
    return torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponents, 0))


def _by_chunk(values: torch.Tensor, chunks: int, group: int) -> torch.Tensor:
    """Arrange [out, groups] as [chunks, groups of a chunk, out], filled up with zeros."""
    per_chunk = CHUNK // group
    padded = pad(values, (0, chunks * per_chunk - values.shape[1]))
    return padded.t().reshape(chunks, per_chunk, -1)


def _planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [chunks, out, 128] uint8 → [chunks, out, bytes]."""
    if bits == 8:
        return codes
    nibbles = (codes[..., :HALF] & 15) | ((codes[..., HALF:] & 15) << 4)
    if bits in (4, E2M1):
        return nibbles
    width = bits - 4
    per_byte = 8 // width
    high = (codes >> 4).view(*codes.shape[:2], per_byte, CHUNK // per_byte)
    plane = torch.zeros_like(high[:, :, 0])
    for place in range(per_byte):
        plane |= high[:, :, place] << (place * width)
    return torch.cat([nibbles, plane], -1)
