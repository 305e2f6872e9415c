"""Decoder of the block formats of GGUF: codes, scales and offsets of each group of a block.

Every format is w = scale · (code - zero) or w = scale · code + offset over groups of 16 or 32
values; the two-level "K" formats store scales as small integers times one fp16 number per 256
values. Codes and scales together have at most 24 significant bits, so every product here is exact
in fp32. Only the last addition of the formats with an offset rounds: the result is the same, bit
for bit, in any order of computation. Source: the block structures of ggml-quants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..base.errors import UnsupportedModel
from ..kernels.arrays import tensor
from ..kernels.weights import BlockWeight
from .ggml_types import BY_NAME, QUANTISED

CHUNK_VALUES = 32_000
"""Values decoded at a time. Below 32,768 torch runs an operator on the calling thread. Above, two
threads meet at a barrier in each of twenty short operators. That costs up to forty times as much if
other processes want the cores, and gains little if they do not."""


class Codes(NamedTuple):
    """n decoded blocks of K values in groups of g: w = scales · (codes - zero) + offsets."""

    codes: torch.Tensor
    """[n, K] uint8."""
    scales: torch.Tensor
    """[n, K / g] fp32."""
    offsets: torch.Tensor | None
    """[n, K / g] fp32; None: no offset beyond `zero`."""
    zero: int


class Format(NamedTuple):
    """One block format: width of a code in bits, values per group, its decoder."""

    bits: int
    group: int
    decode: Callable[[torch.Tensor], Codes]
    """blocks [n, bytes per block] uint8 → `Codes`."""


def dequantise(weight: BlockWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight as a dense tensor [out, in] of `dtype`, rounded once from the exact fp32
    value."""
    out = torch.empty(weight.shape, dtype=dtype, device=tensor(weight.data).device)
    rows, columns = weight.shape
    step = max(1, CHUNK_VALUES // columns)
    fmt = format_of(weight.kind)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        decoded = fmt.decode(blocks_of(weight, first, last))
        values = decoded.codes.to(torch.float32)
        if decoded.zero:
            values -= decoded.zero
        grouped = values.view(-1, fmt.group)
        grouped *= decoded.scales.view(-1, 1)
        if decoded.offsets is not None:
            grouped += decoded.offsets.view(-1, 1)
        out[first:last] = values.view(last - first, columns)
    return out


def format_of(kind: str) -> Format:
    """Return the format of a ggml type name. Raises `UnsupportedModel` for an unsupported
    type."""
    if kind not in FORMATS:
        raise UnsupportedModel(
            f"GGUF tensor type {kind} is not supported; supported: F32, F16, BF16, "
            f"{', '.join(QUANTISED)}"
        )
    return FORMATS[kind]


def blocks_of(weight: BlockWeight, first: int, last: int) -> torch.Tensor:
    """Return the blocks of rows first … last - 1: [blocks, bytes per block] uint8."""
    kind = BY_NAME[weight.kind]
    data = tensor(weight.data)
    assert data.dtype == torch.uint8
    assert data.shape == (weight.shape[0], kind.row_bytes(weight.shape[1]))
    return data[first:last].reshape(-1, kind.nbytes)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the fp16 number at byte `at` of each block, as fp32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _fields(packed: torch.Tensor, width: int, run: int) -> torch.Tensor:
    """Extract fields of `width` bits, low bits first, from runs of `run` bytes: [n, B] → [n, B ·
    8/width].

    Field f of byte j of run r is value (r · 8/width + f) · run + j.
    """
    per_byte = 8 // width
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    out = torch.empty(
        (packed.shape[0], runs.shape[1], per_byte, run), dtype=torch.uint8, device=packed.device
    )
    for field in range(per_byte):
        shifted = runs[:, :, 0] >> (field * width) if field else runs[:, :, 0]
        if field < per_byte - 1:
            shifted = shifted & ((1 << width) - 1)
        out[:, :, field] = shifted
    return out.view(packed.shape[0], -1)


def _four(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return _fields(blocks[:, at : at + 16], 4, 16)


def _five(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Read a fifth bit per value in 4 bytes at `at` (bit i for value i), then four low bits."""
    bit = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, at : at + 4, None] >> bit) & 1
    return _four(blocks, at + 4) | (high.view(-1, 32) << 4)


def _q4_0(b: torch.Tensor) -> Codes:
    return Codes(_four(b, 2), _half(b, 0), None, 8)


def _q4_1(b: torch.Tensor) -> Codes:
    return Codes(_four(b, 4), _half(b, 0), _half(b, 2), 0)


def _q5_0(b: torch.Tensor) -> Codes:
    return Codes(_five(b, 2), _half(b, 0), None, 16)


def _q5_1(b: torch.Tensor) -> Codes:
    return Codes(_five(b, 4), _half(b, 0), _half(b, 2), 0)


def _q8_0(b: torch.Tensor) -> Codes:
    # int8 x + 128 as unsigned is x with its top bit flipped.
    return Codes(b[:, 2:] ^ 0x80, _half(b, 0), None, 128)


def _q2_k(b: torch.Tensor) -> Codes:
    """Decode 16 bytes of 4-bit scale and minimum, 64 of codes, d, dmin."""
    scales, minima = b[:, :16] & 15, b[:, :16] >> 4
    return Codes(_fields(b[:, 16:80], 2, 32), _half(b, 80) * scales, -_half(b, 82) * minima, 0)


def _q3_k(b: torch.Tensor) -> Codes:
    """Decode 32 bytes of third bits, 64 of two low bits, 12 of 6-bit scales, d."""
    low = _fields(b[:, 96:104], 4, 8)
    high = _fields(b[:, 104:108], 2, 4)
    scales = (low | (high << 4)).to(torch.float32) - 32
    third = _fields(b[:, :32], 1, 32)
    # The third bit is worth 4; stored clear it means that 4 is subtracted.
    codes = _fields(b[:, 32:96], 2, 32) | (third << 2)
    return Codes(codes, _half(b, 108) * scales, None, 4)


def _k_scales(b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode eight 6-bit scales and minima [n, 8] from the 12 bytes at 4 (Q4_K, Q5_K)."""
    d, m, both = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((d & 0x3F, (both & 0x0F) | ((d >> 2) & 0x30)), dim=1)
    minima = torch.cat((m & 0x3F, (both >> 4) | ((m >> 2) & 0x30)), dim=1)
    return _half(b, 0) * scales, -_half(b, 2) * minima


def _q4_k(b: torch.Tensor) -> Codes:
    return Codes(_fields(b[:, 16:144], 4, 32), *_k_scales(b), 0)


def _q5_k(b: torch.Tensor) -> Codes:
    high = _fields(b[:, 16:48], 1, 32)
    return Codes(_fields(b[:, 48:176], 4, 32) | (high << 4), *_k_scales(b), 0)


def _q6_k(b: torch.Tensor) -> Codes:
    """Decode 128 bytes of four low bits, 64 of two high bits, 16 int8 scales, d."""
    low = _fields(b[:, :128], 4, 64)
    high = _fields(b[:, 128:192], 2, 32)
    scales = b[:, 192:208].view(torch.int8).to(torch.float32)
    return Codes(low | (high << 4), _half(b, 208) * scales, None, 32)


def _mxfp4(b: torch.Tensor) -> Codes:
    """Decode a power of two, then numbers of four bits; twice a number is whole, from -12 to 12
    (OCP Microscaling Formats 1.0)."""
    codes = torch.tensor(_TWICE, dtype=torch.uint8, device=b.device)[_four(b, 1).long()]
    power = b[:, :1].to(torch.int32)
    scales = torch.where(power < 2, 0x200000 << power.clamp(max=1), (power - 1) << 23)
    scales = scales.view(torch.float32)
    return Codes(codes, scales, None, 16)


def _looked_up(b: torch.Tensor, at: int) -> torch.Tensor:
    """Look four bits at byte `at` up among IQ4_NL's values: [n, 32] uint8, each plus 128."""
    return torch.tensor(_NON_LINEAR, dtype=torch.uint8, device=b.device)[_four(b, at).long()]


def _iq4_nl(b: torch.Tensor) -> Codes:
    return Codes(_looked_up(b, 2), _half(b, 0), None, 128)


def _iq4_xs(b: torch.Tensor) -> Codes:
    """Decode d, the two upper bits of eight scales, their four lower ones, 128 bytes of codes."""
    low, high = _fields(b[:, 4:8], 4, 1), _fields(b[:, 2:4], 2, 1)
    scales = (low | (high << 4)).to(torch.float32) - 32
    codes = torch.cat([_looked_up(b, 8 + 16 * group) for group in range(8)], dim=1)
    return Codes(codes, _half(b, 0) * scales, None, 128)


_NON_LINEAR = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241]
"""Values of IQ4_NL's codes, plus 128."""
_TWICE = [16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4]
"""Twice the number of each four-bit code, plus 16."""
FORMATS: dict[str, Format] = {
    "Q4_0": Format(4, 32, _q4_0),
    "Q4_1": Format(4, 32, _q4_1),
    "Q5_0": Format(5, 32, _q5_0),
    "Q5_1": Format(5, 32, _q5_1),
    "Q8_0": Format(8, 32, _q8_0),
    "Q2_K": Format(2, 16, _q2_k),
    "Q3_K": Format(3, 16, _q3_k),
    "Q4_K": Format(4, 32, _q4_k),
    "Q5_K": Format(5, 32, _q5_k),
    "Q6_K": Format(6, 16, _q6_k),
    "MXFP4": Format(5, 32, _mxfp4),
    "IQ4_NL": Format(8, 32, _iq4_nl),
    "IQ4_XS": Format(8, 32, _iq4_xs),
}
assert set(FORMATS) == set(QUANTISED)
