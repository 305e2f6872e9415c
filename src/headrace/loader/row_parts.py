"""Matrices stored as one, with rows ordered by heads: cut into those of the model.

In gated attention (Qwen3-Next) `q_proj` has for each head its queries, then its gate. In layers
with states `in_proj_qkvz` has for each key head q, k, and v and z of its value heads; `in_proj_ba`
has b and a.
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
    """Rows of a stored matrix, read when it is taken."""

    source: StoredTensor
    order: Order

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.order), *self.source.shape[1:])

    @property
    def host_dtype(self) -> str:
        """Return the type as `kernels.arrays.dtype_name` names it."""
        return self.source.host_dtype

    def read(self) -> npt.NDArray[Any]:
        """Read its numbers [shape]; raises `ModelFileError`."""
        return self.source.read()[self.order]


def parts(name: str, shape: tuple[int, ...], arch: ModelArch) -> dict[str, Order]:
    """Return name → rows of each matrix that the tensor `name` becomes.

    Empty if it stays one matrix, or lacks the architecture's number of rows.
    """
    at, _, last = name.removesuffix(".weight").rpartition(".")
    found: dict[str, Order] = {}
    of = arch.recurrence
    if of is not None and of.kind == "delta":
        each = of.value_heads // of.key_heads
        values = each * of.value_size
        sizes = {"q": of.key_size, "k": of.key_size, "v": values, "z": values}
        if last == "q_proj":
            found = _cut({"q_proj": arch.head_dim, "gate_proj": arch.head_dim}, arch.heads)
        elif last == "in_proj_qkvz":
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
    """Yield the unread matrices of a tensor."""
    for part, order in parts(name, tensor.shape, arch).items():
        if isinstance(tensor, QuantisedMatrix):
            yield part, replace(tensor, shape=(len(order), tensor.shape[1]), order=order)
        else:
            yield part, PickedRows(tensor, order)


def _cut(sizes: dict[str, int], heads: int) -> dict[str, Order]:
    """Return the rows of each part if every head has all parts one after the other."""
    width = sum(sizes.values())
    rows = np.arange(heads * width).reshape(heads, width)
    found, first = {}, 0
    for part, size in sizes.items():
        found[part] = rows[:, first : first + size].reshape(-1)
        first += size
    return found
