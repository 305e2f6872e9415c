"""The GPU's layout of a packed weight, and how it is made from the plain one.

Codes lie in *chunks* of 128 values along the input, chunk-major, so that the tile of any program
is one contiguous run: `codes[chunk, out, bytes]`. Within a chunk and row:

    bits 4   64 bytes: byte j holds value j in its low and value j + 64 in its high nibble
    bits 5   the same 64 bytes, then 16: bit i of byte j is bit 4 of value 16 · i + j
    bits 6   the same 64 bytes, then 32: bits 2i, 2i+1 of byte j are bits 4, 5 of value 32 · i + j
    bits 8   128 bytes, one a value

so 64 neighbouring values come out of 64 neighbouring bytes by one mask or one shift, without a
shuffle between threads, and no byte is fetched that is not used. Scales and offsets are
`[groups, out]`: the outputs of a tile are neighbours. Inputs that are no multiple of 128 are padded
with codes of scale zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ..weights import PackedWeight, TiledWeight, Weight

CHUNK = 128
"""Values of a chunk; groups are at most this large and divide it."""
HALF = 64
BYTES = {4: 64, 5: 80, 6: 96, 8: 128}
"""Bytes of one chunk of one row."""


def tile_weight(weight: PackedWeight) -> TiledWeight:
    """From the plain layout ("rows": one code a byte); lossless."""
    assert weight.layout == "rows"
    assert weight.bits in BYTES, f"{weight.bits} bits"
    assert CHUNK % weight.group == 0, f"groups of {weight.group}"
    out, width = weight.shape
    codes = pad(weight.codes, (0, -width % CHUNK)).view(out, -1, CHUNK).transpose(0, 1)
    groups = codes.shape[0] * CHUNK // weight.group
    return TiledWeight(
        _planes(codes, weight.bits).contiguous(),
        _columns(weight.scales, groups),
        None if weight.offsets is None else _columns(weight.offsets, groups),
        weight.bits,
        weight.group,
        weight.shape,
    )


def merge_tiled(parts: Sequence[Weight]) -> TiledWeight | None:
    """Weights one below the other as one weight, where all are packed alike; else None."""
    first = parts[0]
    if not isinstance(first, TiledWeight):
        return None
    tiled = [part for part in parts if isinstance(part, TiledWeight)]
    kinds = {(p.bits, p.group, p.offsets is None, p.shape[1], p.scales.dtype) for p in tiled}
    if len(tiled) < len(parts) or len(kinds) > 1:
        return None
    offsets = [part.offsets for part in tiled if part.offsets is not None]
    return TiledWeight(
        torch.cat([part.codes for part in tiled], 1),
        torch.cat([part.scales for part in tiled], 1),
        torch.cat(offsets, 1) if offsets else None,
        first.bits,
        first.group,
        (sum(part.shape[0] for part in tiled), first.shape[1]),
    )


def _columns(values: torch.Tensor, groups: int) -> torch.Tensor:
    return pad(values, (0, groups - values.shape[1])).t().contiguous()


def _planes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes [chunks, out, 128] uint8 → [chunks, out, bytes]."""
    if bits == 8:
        return codes
    nibbles = (codes[..., :HALF] & 15) | ((codes[..., HALF:] & 15) << 4)
    if bits == 4:
        return nibbles
    width = bits - 4
    per_byte = 8 // width
    high = (codes >> 4).view(*codes.shape[:2], per_byte, CHUNK // per_byte)
    plane = torch.zeros_like(high[:, :, 0])
    for place in range(per_byte):
        plane |= high[:, :, place] << (place * width)
    return torch.cat([nibbles, plane], -1)
