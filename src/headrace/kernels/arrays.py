"""Arrays of two kinds under one name: numpy's in host memory, torch's on any device.

Our CPU kernels read and write memory by address, so a process that serves with them holds numpy
arrays and never imports torch. That import would cost more time and memory than the rest of the
start. The reference and the kernels of GPUs compute on tensors. `Operators.host` says which kind a
model is built of; `tensor` and `host` convert between them without a copy.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array = Any
"""A numpy array or a torch tensor. Only use what both offer: shape, length, nbytes, slices."""

HOST_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}
"""Numpy dtype of each torch type in host arrays. Numpy has no bfloat16: its bits are uint16."""
_LINE = 64


def address(x: Array) -> int:
    """Return the address of the first element in host memory."""
    if isinstance(x, np.ndarray):
        at: int = x.__array_interface__["data"][0]
        return at
    return int(x.data_ptr())


def stride(x: Array, dimension: int) -> int:
    """Return the distance between neighbouring indices of this dimension, in elements."""
    if isinstance(x, np.ndarray):
        return x.strides[dimension] // x.itemsize
    return int(x.stride(dimension))


def contiguous(x: Array) -> bool:
    """Return whether the array lies in C order without gaps."""
    return bool(x.flags.c_contiguous) if isinstance(x, np.ndarray) else bool(x.is_contiguous())


def mapped(x: Array) -> bool:
    """Return whether this loaded weight is a view of its file's mapping. Such views are never
    written, so their pages may be dropped and read again."""
    while isinstance(x, np.ndarray | memoryview):
        x = x.base if isinstance(x, np.ndarray) else x.obj
    return isinstance(x, mmap.mmap)


def dtype_name(x: Array) -> str:
    """Return torch's name for the type of the array's numbers: "float32", "bfloat16", "int8" and so
    on."""
    name = str(x.dtype).removeprefix("torch.")
    return "bfloat16" if name == "uint16" else name


def floats(x: Array) -> npt.NDArray[np.float32]:
    """Return the numbers as fp32 in host memory, without a copy if they already are."""
    if not isinstance(x, np.ndarray):
        found: npt.NDArray[np.float32] = x.float().cpu().numpy()
        return found
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32, copy=False)


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocate host memory aligned to a cache line."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _LINE, np.uint8)
    start = -address(room) % _LINE
    return room[start : start + size].view(dtype).reshape(shape)


def floats_like(x: Array, *shape: int) -> Array:
    """Allocate fp32 numbers in an array of the same kind and device as `x`."""
    if isinstance(x, np.ndarray):
        return np.empty(shape, np.float32)
    found: Array = _torch().empty(shape, device=x.device)
    return found


def joined(parts: Sequence[Array], axis: int) -> Array:
    """Concatenate arrays of one kind along an axis."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    found: Array = _torch().cat(list(parts), axis)
    return found


def tensor(x: Array) -> torch.Tensor:
    """View the same memory as a tensor. Imports torch."""
    found: torch.Tensor
    if not isinstance(x, np.ndarray):
        found = x
        return found
    torch = _torch()
    found = torch.from_numpy(x)
    return found.view(torch.bfloat16) if x.dtype == np.uint16 else found


def host(x: Array) -> npt.NDArray[Any]:
    """View the same memory as a numpy array; `x` must be in host memory and not bfloat16."""
    return x if isinstance(x, np.ndarray) else x.numpy()


def _torch() -> Any:
    import torch  # Local: a process without tensors does not import it.

    return torch
