"""Random weights in every GGUF block format, and what a quantised product should give."""

from __future__ import annotations

import numpy as np
import torch

from headrace.kernels.arrays import Array, tensor
from headrace.kernels.weights import BlockWeight
from headrace.quant.ggml import dequantise

KINDS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
BLOCKS = {  # values, bytes, where its fp16 numbers are
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
    "MXFP4": (32, 17, (0,)),
    "IQ4_NL": (32, 18, (0,)),
    "IQ4_XS": (256, 136, (0,)),
}


def random_blocks(kind: str, out: int, width: int, seed: int = 0) -> BlockWeight:
    """Random codes and scales: every bit of the format is in use."""
    generator = np.random.default_rng(seed)
    values, size, halves = BLOCKS[kind]
    assert width % values == 0
    blocks = generator.integers(0, 256, (out, width // values, size), dtype=np.uint8)
    for at in halves:
        scales = (generator.standard_normal(blocks.shape[:2]) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":  # Its scale is a byte: from 2^-16 to 2^-8.
        blocks[..., 0] = generator.integers(112, 120, blocks.shape[:2])
    data = torch.from_numpy(blocks.reshape(out, -1))
    return BlockWeight(kind, data, (out, width))


def quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """Activations as the kernels see them: int8 per row and 32 of K, expanded again (float64)."""
    groups = x.float().view(len(x), -1, 32)
    top = groups.abs().amax(-1, keepdim=True)
    # `127.0 / top` would be torch's reciprocal times 127, which rounds twice.
    inverse = torch.where(top > 1e-30, torch.full_like(top, 127.0) / top, 0)
    codes = torch.round(groups * inverse)
    return (codes.double() * (top / 127.0).double()).view(x.shape)


def exact_product(x: torch.Tensor, weight: BlockWeight) -> torch.Tensor:
    """x · wᵀ in float64, of the quantised activations and the exact weight."""
    return quantise_rows(x) @ dequantise(weight, torch.float32).double().T


def same(one: Array, other: Array) -> bool:
    """Bit for bit, whichever kind of array they are."""
    return torch.equal(tensor(one), tensor(other))
