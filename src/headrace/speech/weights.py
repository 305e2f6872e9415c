"""Whisper's tensors for the CPU library, by its graphs: packed from the file, or found in the
packed-weight cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..base.graph import Graph, WeightRef
from ..kernels.arrays import aligned
from ..kernels.backend import Shelf
from ..kernels.cpu.coded import KeptWeight
from ..kernels.cpu.library import Team
from ..kernels.cpu.panels import Packer
from ..kernels.prepared import Prepared
from ..kernels.weights import BlockWeight, DenseWeight, PanelWeight

Array = npt.NDArray[Any]
_AT_ONCE = 1 << 16
"""Numbers that are quantised at a time."""


class WhisperTensors(Protocol):
    """WhisperTensors of a model by Whisper's names."""

    @property
    def table(self) -> Array: ...
    @property
    def tensor(self) -> Callable[[str], Array]: ...


def prepared(
    graphs: Iterable[Graph], files: WhisperTensors, team: Team, coded: bool, shelf: Shelf | None
) -> Prepared:
    """Prepare every weight of the graphs. `coded`: matrices in eight bits, except the convolutions,
    which are 3 % of the work. Raises `ModelFileError`."""
    packer, made = Packer(team, shelf), Prepared()
    for graph in graphs:
        for ref in graph.weights():
            if ref.role == "vector":
                made.by_key[ref.key] = _vector(files, ref)
            elif ref.role == "embed":
                made.by_key[ref.key] = _table(files, ref)
            else:
                made.by_key[ref.key] = _packed(files, ref, packer, coded, shelf)
    return made


def _vector(files: WhisperTensors, ref: WeightRef) -> Array:
    (name,), (size,) = ref.names, ref.rows
    found = aligned((size,), np.float32)
    found[:] = _shaped(files.tensor(name), name, size)
    return found


def _table(files: WhisperTensors, ref: WeightRef) -> DenseWeight:
    """Return a table that is read row by row: the embedding as its file has it."""
    (name,) = ref.names
    data = files.table if name.endswith("embed_tokens.weight") else files.tensor(name)
    return DenseWeight(_shaped(data, name, *ref.rows, ref.width), name)


def _packed(
    files: WhisperTensors, ref: WeightRef, packer: Packer, coded: bool, shelf: Shelf | None
) -> PanelWeight:
    name, shape = ref.names[0].removesuffix(".weight"), (ref.out, ref.width)
    codes = coded and ".conv" not in name
    read = partial(_read, files, name, shape, codes)
    kind = None if shelf is None else shelf.kind(name)
    if kind is not None and codes == (kind == "Q8_0"):
        return packer.pack(KeptWeight(kind, name, shape, None, read))
    return packer.pack(read())


def _read(
    files: WhisperTensors, name: str, shape: tuple[int, int], coded: bool
) -> BlockWeight | DenseWeight:
    data = files.tensor(f"{name}.weight")
    if data.ndim == 3:
        # A window of three frames is three consecutive rows.
        data = data.transpose(0, 2, 1).reshape(len(data), -1)
    data = _shaped(data, f"{name}.weight", *shape)
    return q8_0(data, name) if coded else DenseWeight(np.ascontiguousarray(data), name)


def _shaped(data: Array, name: str, *shape: int) -> Array:
    if data.shape != shape:
        raise ModelFileError(f"{name} is {data.shape}, not {shape}")
    return data


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
