"""Tensors of a folder's `model.safetensors`, as arrays of the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..loader.safetensors_file import StoredTensor


def stored(header: Mapping[str, StoredTensor], name: str) -> npt.NDArray[Any]:
    """The tensor of that name in fp32 or fp16. Raises `ModelFileError` where there is none."""
    found = header.get(name)
    if found is None or found.host_dtype not in ("float32", "float16", "bfloat16"):
        raise ModelFileError(f"{name} is missing, or is not in fp32, fp16 or bf16")
    data: npt.NDArray[Any] = found.read()
    if found.host_dtype == "bfloat16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data
