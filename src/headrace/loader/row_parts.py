"""Matrices that a file holds as one, with their rows by heads: cut into those of the model.

Gated attention (Qwen3-Next) has of each head its queries and then its gate in `q_proj`. Its layers
with states have of each key head q, k, v and z of its value heads in `in_proj_qkvz`, b and a in
`in_proj_ba`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.arch import ModelArch
from .quantised_safetensors import QuantisedMatrix
from .safetensors_file import StoredTensor

Order = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Rows of a stored matrix, to be read when it is taken."""

    source: StoredTensor
    order: Order

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.order), *self.source.shape[1:])

    @property
    def host_dtype(self) -> str:
        """Type as `kernels.arrays.dtype_name` names it."""
        return self.source.host_dtype

    def read(self) -> npt.NDArray[Any]:
        """Its numbers [shape]; raises `ModelFileError`."""
        return self.source.read()[self.order]


def parts(name: str, shape: tuple[int, ...], arch: ModelArch) -> dict[str, Order]:
    """Name → rows of each matrix that the tensor `name` becomes; empty where it stays one, or is
    no matrix of the rows that the architecture says."""
    at, _, last = name.removesuffix(".weight").rpartition(".")
    found: dict[str, Order] = {}
    if last == "q_proj" and arch.attention_gate:
        found = _cut({"q_proj": arch.head_dim, "gate_proj": arch.head_dim}, arch.heads)
    of = arch.recurrence
    if of is not None and of.kind == "delta":
        each = of.value_heads // of.key_heads
        values = each * of.value_size
        sizes = {"q": of.key_size, "k": of.key_size, "v": values, "z": values}
        if last == "in_proj_qkvz":
            cut = _cut(sizes, of.key_heads)
            mixed = np.concatenate([cut[part] for part in "qkv"])
            found = {"in_proj_qkv": mixed, "in_proj_z": cut["z"]}
        elif last == "in_proj_ba":
            found = _cut({"in_proj_b": each, "in_proj_a": each}, of.key_heads)
    if len(shape) != 2 or sum(map(len, found.values())) != shape[0]:
        return {}
    return {f"{at}.{part}.weight": order for part, order in found.items()}


def stored(
    name: str, tensor: StoredTensor | QuantisedMatrix, arch: ModelArch
) -> Iterator[tuple[str, PickedRows | QuantisedMatrix]]:
    """The matrices of a tensor, yet to be read."""
    for part, order in parts(name, tensor.shape, arch).items():
        if isinstance(tensor, QuantisedMatrix):
            yield part, replace(tensor, shape=(len(order), tensor.shape[1]), order=order)
        else:
            yield part, PickedRows(tensor, order)


def _cut(sizes: dict[str, int], heads: int) -> dict[str, Order]:
    """The rows of each part where every head has all parts one after the other."""
    width = sum(sizes.values())
    rows = np.arange(heads * width).reshape(heads, width)
    found, first = {}, 0
    for part, size in sizes.items():
        found[part] = rows[:, first : first + size].reshape(-1)
        first += size
    return found
