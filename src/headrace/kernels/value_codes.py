"""Values of a KV cache in four bits: the reference of csrc/value_codes.h.

A head is rotated by the Hadamard matrix of the size of the largest power of two that divides it
(QuaRot, Ashkboos et al. 2024), which spreads a few large numbers over the rest. The result is close
to normally distributed, so each number becomes the nearest of Lloyd's and Max's sixteen levels for
the normal distribution. Number j is in the low half of byte j, number j + E / 2 in its high half.
"""

from __future__ import annotations

import torch

MAGNITUDES = (6.0, 18.0, 31.0, 44.0, 58.0, 75.0, 96.0, 127.0)
"""The levels above zero, in 1/`DEVIATION` of the deviation: whole numbers of a signed byte."""
DEVIATION = 46.5


def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode values [..., E] as codes uint8 [..., E / 2] and the scale of their levels, bf16
    [...]."""
    turned = hadamard(values.float())
    magnitudes = torch.tensor(MAGNITUDES, device=values.device)
    limits = (magnitudes[1:] + magnitudes[:-1]) / 2
    unit = turned.square().mean(-1, keepdim=True).sqrt() / DEVIATION
    place = (turned.abs().unsqueeze(-1) > unit.unsqueeze(-1) * limits).sum(-1)
    levels = torch.where(turned < 0, -magnitudes[place], magnitudes[place])
    codes = torch.where(turned < 0, 7 - place, 8 + place)
    # The scale with the nearest levels, divided by the factor of the inverse rotation.
    scale = (turned * levels).sum(-1) / (levels.square().sum(-1) * _at_once(values.shape[-1]))
    low, high = codes.chunk(2, -1)
    return (low | high << 4).to(torch.uint8), scale.to(torch.bfloat16)


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the values given to `encode`, as far as codes and scale preserve them: fp32 [...,
    E]."""
    places = torch.cat([codes & 15, codes >> 4], -1).long()
    levels = torch.tensor([-x for x in MAGNITUDES[::-1]] + list(MAGNITUDES), device=codes.device)
    return hadamard(levels[places] * scale.unsqueeze(-1))


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiply x [..., E] by the matrix of ones and minus ones, in blocks."""
    width, half = x.shape[-1], 1
    while half < _at_once(width):
        pairs = x.reshape(*x.shape[:-1], -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return x


def _at_once(width: int) -> int:
    return width & -width
