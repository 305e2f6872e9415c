"""Whisper's matrices packed for the CPU library: made from the file, or found in the packed-weight
cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..kernels.backend import Shelf
from ..kernels.cpu.coded import KeptWeight
from ..kernels.cpu.library import Team
from ..kernels.cpu.panels import Packer
from ..kernels.weights import BlockWeight, DenseWeight, PanelWeight

Array = npt.NDArray[Any]
_AT_ONCE = 1 << 16
"""Numbers that are quantised at a time."""
_OF_BOTH = {
    "self_attn.qkv_proj": (3, 1),
    "self_attn.out_proj": (1, 1),
    "fc1": (4, 1),
    "fc2": (1, 4),
}
_OF_DECODER = {"q_proj": (1, 1), "kv_proj": (2, 1), "out_proj": (1, 1)}
"""Matrices of a layer, with outputs and inputs in widths of the model."""


class EncoderFiles(Protocol):
    """Interface of the encoder to a model: Whisper's sizes, and tensors by Whisper's names."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def encoder_layers(self) -> int: ...
    @property
    def decoder_layers(self) -> int: ...
    @property
    def mels(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def alignment(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def tensor(self) -> Callable[[str], Array]: ...


def packed(
    files: EncoderFiles, team: Team, coded: bool, shelf: Shelf | None
) -> dict[str, PanelWeight]:
    """Pack all matrices; return them by name. `coded`: in eight bits, except the convolutions,
    which are 3 % of the work. Raises `ModelFileError`."""
    packer, found = Packer(team, shelf), {}
    for name, shape in _matrices(files):
        codes = coded and ".conv" not in name
        read = partial(_read, files, name, shape, codes)
        kind = None if shelf is None else shelf.kind(name)
        if kind is not None and codes == (kind == "Q8_0"):
            found[name] = packer.pack(KeptWeight(kind, name, shape, None, read))
        else:
            found[name] = packer.pack(read())
    return found


def _matrices(files: EncoderFiles) -> Iterator[tuple[str, tuple[int, int]]]:
    width = files.width
    yield "model.encoder.conv1", (width, 3 * files.mels)
    yield "model.encoder.conv2", (width, 3 * width)
    for part, layers in (("encoder", files.encoder_layers), ("decoder", files.decoder_layers)):
        for i in range(layers):
            for name, (outputs, inputs) in _OF_BOTH.items():
                yield f"model.{part}.layers.{i}.{name}", (outputs * width, inputs * width)
            for name, (outputs, inputs) in _OF_DECODER.items() if part == "decoder" else ():
                shape = outputs * width, inputs * width
                yield f"model.{part}.layers.{i}.encoder_attn.{name}", shape
    if files.decoder_layers:
        yield "model.decoder.embed_tokens", (files.vocab, width)


def _read(
    files: EncoderFiles, name: str, shape: tuple[int, int], coded: bool
) -> BlockWeight | DenseWeight:
    data = files.tensor(f"{name}.weight")
    if data.ndim == 3:
        # A window of three frames is three consecutive rows.
        data = data.transpose(0, 2, 1).reshape(len(data), -1)
    if data.shape != shape:
        raise ModelFileError(f"{name}.weight is {data.shape}, not {shape}")
    return q8_0(data, name) if coded else DenseWeight(np.ascontiguousarray(data), name)


def q8_0(matrix: Array, name: str = "") -> BlockWeight:
    """Quantise [out, in] to GGUF's Q8_0: for each 32 an fp16 scale, max |x| / 127, and their codes.

    A few rows at a time, which stay in the cache: that takes numpy a third of the time.
    """
    out, width = matrix.shape
    data = np.empty((out, width // 32, 34), np.uint8)
    step = max(1, _AT_ONCE // width)
    for first in range(0, out, step):
        blocks = matrix[first : first + step].astype(np.float32).reshape(-1, width // 32, 32)
        size = np.abs(blocks)
        largest = size
        while largest.shape[2] > 1:  # numpy is slow along an axis of few numbers.
            half = largest.shape[2] // 2
            largest = np.maximum(largest[..., :half], largest[..., half:])
        scale = (largest / 127).astype(np.float16)
        by = scale.astype(np.float32)
        by[by == 0] = np.inf
        np.rint(np.divide(blocks, by, out=size), out=size)
        into = data[first : first + step]
        into[..., :2] = scale.view(np.uint8)
        into[..., 2:] = np.clip(size, -127, 127, out=size).astype(np.int8).view(np.uint8)
    return BlockWeight("Q8_0", data.reshape(out, -1), (out, width), name)
