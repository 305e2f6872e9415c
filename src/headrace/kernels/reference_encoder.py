"""Reference of the encoders' attention: bidirectional, within each entry.

Row invariance: the shapes of an entry's products depend on its own length only, padded to a
multiple of `TILE`. Entries of one padded length are batched, so that many short inputs need few
products. A batched product computes each member as it would alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TILE = 8
"""Lengths are padded to a multiple of this: larger batches, and no very thin products."""
SCORES = 1 << 22
"""Most fp32 scores held at once."""


def encoder_attention(
    qkv: torch.Tensor, heads: int, bounds: Sequence[int], scale: float
) -> torch.Tensor:
    """Compute bidirectional `Operators.attend`; entry b owns rows bounds[b] : bounds[b + 1]."""
    width = qkv.shape[1] // (3 * heads)
    out = qkv.new_empty(len(qkv), heads * width)
    for padded, entries in _by_length(bounds).items():
        step = max(1, SCORES // (heads * padded * padded))
        for low in range(0, len(entries), step):
            _attend(qkv, heads, bounds, scale, entries[low : low + step], padded, out)
    return out


def _by_length(bounds: Sequence[int]) -> dict[int, list[int]]:
    """Group the entries by padded length."""
    groups: dict[int, list[int]] = {}
    for entry in range(len(bounds) - 1):
        length = bounds[entry + 1] - bounds[entry]
        groups.setdefault(-(-length // TILE) * TILE, []).append(entry)
    return groups


def _attend(
    qkv: torch.Tensor,
    heads: int,
    bounds: Sequence[int],
    scale: float,
    entries: list[int],
    padded: int,
    out: torch.Tensor,
) -> None:
    device = qkv.device
    starts = torch.tensor([bounds[b] for b in entries], device=device).unsqueeze(1)
    lengths = torch.tensor([bounds[b + 1] - bounds[b] for b in entries], device=device).unsqueeze(1)
    places = torch.arange(padded, device=device)
    real = places < lengths
    # Padding repeats an entry's last token: it is finite and gets no weight below.
    rows = starts + torch.minimum(places, lengths - 1)
    parts = qkv[rows].view(len(entries), padded, 3, heads, -1).permute(2, 0, 3, 1, 4)
    q, k, v = parts.float().reshape(3, len(entries) * heads, padded, -1).unbind(0)
    scores = torch.bmm(q * scale, k.transpose(1, 2)).view(len(entries), heads, padded, padded)
    scores.masked_fill_(~real[:, None, None, :], float("-inf"))
    scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    shares = (scores / scores.sum(-1, keepdim=True)).view(-1, padded, padded)
    mixed = torch.bmm(shares, v).view(len(entries), heads, padded, -1).transpose(1, 2)
    mixed = mixed.reshape(len(entries), padded, -1).to(qkv.dtype)
    out[rows[real]] = mixed[real]
