"""Tensors of a folder's file of weights, as host arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..loader.safetensors_file import OpenFile, StoredTensor

_ROWS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


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


def shaped(header: Mapping[str, StoredTensor], name: str, *shape: int) -> npt.NDArray[np.float32]:
    """Read a tensor in fp32; raises `ModelFileError` if it is missing or has another shape."""
    found = stored(header, name).astype(np.float32)
    if found.shape != shape:
        raise ModelFileError(f"{name}: {list(found.shape)}, where {list(shape)} is wanted")
    return found


class StoredRows:
    """Rows of a matrix in a file, read when they are asked for. They stay in the system's page
    cache, without a copy here. A row costs some microseconds."""

    def __init__(
        self,
        file: OpenFile,
        begin: int,
        shape: tuple[int, ...],
        dtype: str,
        scale: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Use a file's matrix. `dtype`: fp32, fp16, bf16 as its bits, or int8; `scale`: divisor of
        each int8 row."""
        self._file, self._begin, self._shape = file, begin, shape
        self._dtype, self._scale = np.dtype(dtype), scale

    def __call__(self, ids: Iterable[int]) -> npt.NDArray[np.float32]:
        """Read rows [n, width] in fp32. Raises `ModelFileError` if the file has become shorter."""
        size = self._shape[1] * self._dtype.itemsize
        parts = [os.pread(self._file.handle, size, self._begin + int(i) * size) for i in ids]
        if any(len(part) != size for part in parts):
            raise ModelFileError("the file became shorter while it was read")
        rows = np.frombuffer(b"".join(parts), self._dtype).reshape(-1, self._shape[1])
        if self._dtype == np.uint16:
            return (rows.astype(np.uint32) << 16).view(np.float32)
        if self._scale is not None:
            by = self._scale[np.asarray(list(ids), np.int64)]
            return np.asarray(rows.astype(np.float32) / by[:, None], np.float32)
        return rows.astype(np.float32)


def rows_of(header: Mapping[str, StoredTensor], name: str) -> StoredRows:
    """Return the rows of a matrix. Raises `ModelFileError` if it is missing or of another type."""
    found = header.get(name)
    if found is None or found.dtype not in _ROWS or len(found.shape) != 2:
        raise ModelFileError(f"{name} is missing, or is no matrix in fp32, fp16 or bf16")
    return StoredRows(found.file, found.begin, found.shape, _ROWS[found.dtype])
