"""Reader of CTranslate2's binary format, version 6, of a `WhisperSpec`: bounded and checked.

The format, from the reader and writer of CTranslate2 (github.com/OpenNMT/CTranslate2, MIT): u32
version, the spec's name, u32 revision, u32 count, and for each variable its name, u8 rank, u32
dimensions, u8 type, u32 bytes, and the bytes; then u32 count of aliases and for each two names. A
name is a u16 length and that number of bytes, the last of them zero; all is little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError, UnsupportedModel
from .safetensors_file import OpenFile

MAX_VARIABLES = 10_000
MAX_RANK = 3
MAX_NAME = 512
_DTYPES: dict[int, str] = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2", 5: "<u2"}
"""Number of a type → numpy's type; bf16 as its bits."""


class Variable(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    begin: int
    """Offset of its bytes in the file."""
    nbytes: int


class BinaryModel:
    """Variables of one file by their names; each is read on access."""

    def __init__(self, path: Path) -> None:
        """Read the file's header. Raises `ModelFileError` if the file violates the format,
        `UnsupportedModel` for another version or another kind of model."""
        self._path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            reader = _BoundedReader(file, size, path.name)
            version = reader.number("<I")
            if version != 6:
                raise UnsupportedModel(f"{path.name}: format version {version}, only 6 is read")
            spec = reader.name()
            if spec != "WhisperSpec":
                raise UnsupportedModel(f"{path.name}: a {spec!r}, only WhisperSpec is read")
            reader.number("<I")
            self.variables: dict[str, Variable] = {}
            for _ in range(reader.count(MAX_VARIABLES)):
                name, variable = reader.name(), reader.variable()
                if name in self.variables:
                    raise reader.fault(f"{name} is there twice")
                self.variables[name] = variable
            for _ in range(reader.count(MAX_VARIABLES)):
                alias, name = reader.name(), reader.name()
                if name not in self.variables or alias in self.variables:
                    raise reader.fault(f"{alias} stands for what is not there")
                self.variables[alias] = self.variables[name]
            if file.tell() != size:
                raise reader.fault("there are bytes behind the last variable")

    def mapped(self, name: str) -> npt.NDArray[Any]:
        """Return an array as a view of the file's mapping, even if its bytes are misaligned:
        `embed` and numpy can read that. Raises `ModelFileError` if the file lacks it."""
        shape, dtype, begin, nbytes = self._variable(name)
        whole = np.frombuffer(OpenFile(self._path).mapping, np.uint8)
        return whole[begin : begin + nbytes].view(dtype).reshape(shape)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Read an array in its own type. Raises `ModelFileError` if the file lacks it."""
        shape, dtype, begin, nbytes = self._variable(name)
        with self._path.open("rb") as file:
            file.seek(begin)
            data = file.read(nbytes)
        if len(data) != nbytes:
            raise ModelFileError(f"{self._path.name}: the file became shorter while it was read")
        return np.frombuffer(data, dtype).reshape(shape)

    def _variable(self, name: str) -> Variable:
        if name not in self.variables:
            raise ModelFileError(f"{self._path.name}: {name} is missing")
        return self.variables[name]


class _BoundedReader:
    """Reader of numbers, names and variables, none of them beyond the file's end."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self._file, self._size, self._name = file, size, name

    def fault(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self._name}: {why}")

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise self.fault("the file ends too early")
        return data

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self._exactly(struct.calcsize(form)))[0])

    def count(self, most: int) -> int:
        count = self.number("<I")
        if count > most:
            raise self.fault(f"{count:,} variables, at most {most:,} are read")
        return count

    def name(self) -> str:
        length = self.number("<H")
        if not 0 < length <= MAX_NAME:
            raise self.fault(f"a name of {length} bytes, 1 to {MAX_NAME} are read")
        try:
            return self._exactly(length).rstrip(b"\0").decode("ascii")
        except UnicodeDecodeError:
            raise self.fault("a name that is not ASCII") from None

    def variable(self) -> Variable:
        rank = self.number("<B")
        if rank > MAX_RANK:
            raise self.fault(f"an array of {rank} dimensions, at most {MAX_RANK} are read")
        shape = tuple(self.number("<I") for _ in range(rank))
        dtype = self.number("<B")
        nbytes = self.number("<I")
        if dtype not in _DTYPES:
            raise self.fault(f"type {dtype} of an array is not known")
        if math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize != nbytes:
            raise self.fault("the bytes of an array are not those of its shape and type")
        begin = self._file.tell()
        if begin + nbytes > self._size:
            raise self.fault("an array reaches beyond the end of the file")
        self._file.seek(nbytes, os.SEEK_CUR)
        return Variable(shape, _DTYPES[dtype], begin, nbytes)
