"""Weights in panels: repacked from the file's blocks, or from dense tensors."""

from __future__ import annotations

import torch

from ..weights import BlockWeight, DenseWeight, PanelWeight
from .library import Team, allocate, load
from .records import KINDS

DENSE_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def kind_of(weight: DenseWeight | BlockWeight) -> str:
    return weight.kind if isinstance(weight, BlockWeight) else DENSE_KINDS[weight.data.dtype]


def packed_bytes(kind: str, shape: tuple[int, int]) -> int:
    """Bytes of a weight in panels; −1 where its kind or shape has none."""
    return int(load().hr_packed_bytes(KINDS.get(kind, 0), *shape))


def pack(
    weight: DenseWeight | BlockWeight, team: Team, room: torch.Tensor | None = None
) -> PanelWeight:
    """The weight in panels of 16 outputs (csrc/layout.h). `room` is uint8 of `packed_bytes`,
    aligned to 64; without it memory is taken for it."""
    kind, data = kind_of(weight), weight.data.contiguous()
    size = packed_bytes(kind, weight.shape)
    if size < 0:
        raise ValueError(f"a {kind} matrix of shape {weight.shape} has no panels")
    target = allocate(size) if room is None else room
    out, width = weight.shape
    row_bytes = data.nbytes // out
    load().hr_pack(
        team.handle, KINDS[kind], data.data_ptr(), row_bytes, out, width, target.data_ptr()
    )
    return PanelWeight(kind, target, weight.shape)
