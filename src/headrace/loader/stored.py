"""Tensors of a folder's file of weights, as host arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from .safetensors_file import StoredTensor


def stored(header: Mapping[str, StoredTensor], name: str) -> npt.NDArray[Any]:
    """Read a tensor in fp32 or fp16. Raises `ModelFileError` if it is missing or of another
    type."""
    found = header.get(name)
    if found is None or found.host_dtype not in ("float32", "float16", "bfloat16"):
        raise ModelFileError(f"{name} is missing, or is not in fp32, fp16 or bf16")
    data: npt.NDArray[Any] = found.read()
    if found.host_dtype == "bfloat16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def mapped(header: Mapping[str, StoredTensor], name: str) -> npt.NDArray[Any]:
    """Return a tensor as a view of its file, in its own type (bf16 as its bits). Raises
    `ModelFileError` if it is missing or of another type."""
    found = header.get(name)
    if found is None or found.host_dtype not in ("float32", "float16", "bfloat16"):
        raise ModelFileError(f"{name} is missing, or is not in fp32, fp16 or bf16")
    return found.mapped()


def shaped(header: Mapping[str, StoredTensor], name: str, *shape: int) -> npt.NDArray[np.float32]:
    """Read a tensor in fp32; raises `ModelFileError` if it is missing or has another shape."""
    found = stored(header, name).astype(np.float32)
    if found.shape != shape:
        raise ModelFileError(f"{name}: {list(found.shape)}, where {list(shape)} is wanted")
    return found
