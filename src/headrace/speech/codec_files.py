"""A folder of SNAC (Siuzdak et al. 2024): `config.json` and `model.safetensors`, checked.

Only the decoder is read. Names are those of the authors' package (github.com/hubertsiuzdak/snac,
MIT). Kernels under weight normalisation are read in each of the three forms that PyTorch has used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError, UnsupportedModel
from ..loader.jsonfile import natural, read_json
from ..loader.safetensors_file import StoredTensor, read_header
from ..loader.stored import shaped

Floats = npt.NDArray[np.float32]
_MOST = {"sampling_rate": 192_000, "decoder_dim": 4_096, "codebook_size": 65_536}
KERNEL = 7
"""Rows of a convolution within a width."""
DILATIONS = 1, 3, 9
"""Dilations of the residual units of a block."""
_PARTS = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)
"""Length and direction of a kernel under weight normalisation."""


@dataclass(frozen=True)
class CodecFiles:
    """Sizes from the folder's config, and its tensors."""

    rate: int
    """Samples a second."""
    latent: int
    """Width of a frame made from the codes."""
    width: int
    """Channels after the first convolution; each block halves them."""
    rates: tuple[int, ...]
    """Number of frames that each block makes of one."""
    strides: tuple[int, ...]
    """Number of frames per code of each level; the first is the largest, the last is 1."""
    codes: int
    """Number of codes of a level."""
    code_width: int
    noise: bool
    header: Mapping[str, StoredTensor]

    @property
    def hop(self) -> int:
        """Return the samples of one code of the first level."""
        return math.prod(self.rates) * self.strides[0]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the decoder's weights in fp32."""
        numbers = (
            math.prod(one.shape)
            for name, one in self.header.items()
            if name.startswith("decoder.") or ".codebook." in name or ".out_proj." in name
        )
        return 4 * sum(numbers)

    @property
    def stream_bytes(self) -> int:
        """Return the bytes of the rows that the layers of one sound keep."""
        reach = (KERNEL - 1) // 2
        numbers, width = 2 * reach * self.latent, self.width
        for _ in self.rates:
            # A transposed convolution keeps a row; a residual unit waits for its reach, too.
            numbers += width
            width //= 2
            numbers += sum(3 * reach * dilation * width for dilation in DILATIONS)
        return 4 * (numbers + 2 * reach * width)

    @property
    def levels(self) -> tuple[int, ...]:
        """Return the level of each code of one first-level code's frames, in language models'
        order.

        Each code comes before the codes of lower levels that it covers: for strides of 4, 2 and 1
        the order is 0 1 2 2 1 2 2.
        """

        def below(level: int) -> list[int]:
            if level + 1 == len(self.strides):
                return [level]
            return [level, *below(level + 1) * (self.strides[level] // self.strides[level + 1])]

        return tuple(below(0))

    def vector(self, name: str, *shape: int) -> Floats:
        """Read a tensor in fp32; raises `ModelFileError` if it has another shape."""
        return shaped(self.header, name, *shape)

    def kernel(self, name: str, *shape: int) -> Floats:
        """Read a convolution's kernel in fp32. Under weight normalisation it is length times
        direction, normalised over all but the first dimension."""
        for length, direction in _PARTS:
            if name + direction in self.header:
                v = self.vector(name + direction, *shape).astype(np.float64)
                g = self.vector(name + length, shape[0], *[1] * (len(shape) - 1))
                norm = np.sqrt((v**2).sum(axis=tuple(range(1, len(shape))), keepdims=True))
                return np.asarray(v * (g / np.maximum(norm, 1e-30)), np.float32)
        return self.vector(name + ".weight", *shape)


def open_codec(folder: Path) -> CodecFiles:
    """Open a codec's folder. Raises `ModelFileError`, and `UnsupportedModel` for a variant of SNAC
    that has attention, or convolutions over all channels instead of depthwise ones."""
    config = read_json(folder / "config.json")
    if config.get("attn_window_size") is not None:
        raise UnsupportedModel("config.json: attn_window_size: a codec with attention is not run")
    if config.get("depthwise") is not True:
        raise UnsupportedModel("config.json: depthwise: only true is run")
    sizes = {name: natural(config, name, most) for name, most in _MOST.items()}
    rates = _naturals(config, "decoder_rates")
    strides = _naturals(config, "vq_strides")
    falls = all(not a % b for a, b in pairwise(strides))
    if strides[-1] != 1 or not falls:
        raise UnsupportedModel("config.json: vq_strides: each must divide the one before, to 1")
    width = sizes["decoder_dim"]
    if width % 2 ** len(rates) or width >> len(rates) < 8:
        raise UnsupportedModel("config.json: decoder_dim cannot be halved by each of decoder_rates")
    if "latent_dim" in config and config["latent_dim"] is not None:
        latent = natural(config, "latent_dim", 4_096)
    else:
        first = natural(config, "encoder_dim", 4_096)
        latent = first << len(_naturals(config, "encoder_rates"))
    if latent > 4_096:
        raise UnsupportedModel(f"config.json: a latent of {latent:,}, at most 4,096 is run")
    return CodecFiles(
        sizes["sampling_rate"],
        latent,
        width,
        rates,
        strides,
        sizes["codebook_size"],
        natural(config, "codebook_dim", 512),
        config.get("noise", True) is True,
        read_header(folder / "model.safetensors"),
    )


def _naturals(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = config.get(name)
    if not isinstance(value, list) or not 0 < len(value) <= 6:
        raise ModelFileError(f"config.json: {name} must be a list of one to six numbers")
    if not all(type(one) is int and 0 < one <= 16 for one in value):
        raise ModelFileError(f"config.json: {name} must hold numbers from 1 to 16")
    return tuple(value)
