"""Conversion of a block-quantised weight to the "rows" layout: one code per byte, fp32 scales.

The plain member of the packed family: kernels repack it into their own layout.
"""

from __future__ import annotations

import torch

from ..kernels.weights import BlockWeight, PackedWeight
from .ggml import blocks_of, format_of


def unpack(weight: BlockWeight) -> PackedWeight:
    """Return codes uint8 [out, in], scales and offsets fp32 [out, in / group]; without loss.

    codes · scales + offsets, computed in fp32, equals `dequantise` bit for bit: the product and
    the zero point's offset are exact, see `quant.ggml`.
    """
    rows, columns = weight.shape
    fmt = format_of(weight.kind)
    decoded = fmt.decode(blocks_of(weight, 0, rows))
    groups = (rows, columns // fmt.group)
    scales = decoded.scales.reshape(groups)
    offsets = decoded.offsets
    if decoded.zero:
        assert offsets is None
        offsets = scales * -float(decoded.zero)
    return PackedWeight(
        codes=decoded.codes.reshape(rows, columns).contiguous(),
        scales=scales.contiguous(),
        offsets=None if offsets is None else offsets.reshape(groups).contiguous(),
        bits=fmt.bits,
        group=fmt.group,
        shape=weight.shape,
    )


def weights_of(packed: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the dense weights [out, in] of a packed weight in the "rows" layout."""
    assert packed.layout == "rows"
    values: torch.Tensor = packed.codes.to(torch.float32).view(-1, packed.group)
    values = values * packed.scales.reshape(-1, 1)
    if packed.offsets is not None:
        values += packed.offsets.reshape(-1, 1)
    return values.view(packed.shape).to(dtype)
