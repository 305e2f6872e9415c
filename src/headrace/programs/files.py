"""Program files: read once, through a bound, and only what the folder itself holds.

A library gets the bytes that were inspected, never a path: a file replaced meanwhile changes
nothing. Outside data is opened component by component below the model's folder, links refused.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..base.errors import InvalidRequest, ModelFileError
from .onnx import OnnxTensor

MOST_BYTES = 2**31 - 1
"""Largest protobuf message that libraries read."""
_KINDS = (
    (0, b"\x80", "a pickle, which runs code as it is read"),
    (4, b"ORTM", "an ONNX Runtime dump (.ort), which is not checked when loaded"),
    (4, b"TFL3", "a TensorFlow Lite file"),
    (0, b"GGUF", "a language model: `headrace serve`"),
)
_ONLY = os.O_RDONLY | os.O_CLOEXEC


def read(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file. Raises `InvalidRequest` if it cannot be, `ModelFileError` if it is too
    large."""
    try:
        handle = os.open(path, _ONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest(f"{path} cannot be read: {reason}", param="file") from error
    return _read(handle, str(path), most)


def _read(handle: int, name: str, most: int) -> bytes:
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise ModelFileError(f"{name} is no regular file")
    with os.fdopen(handle, "rb") as file:
        if found.st_size > most:
            raise ModelFileError(f"{name} has {found.st_size:,} bytes, at most {most:,} are read")
        return file.read(most)


def _outside(folder: Path, location: str, most: int) -> bytes:
    """Read a data file below `folder`. Raises `ModelFileError`."""
    parts = location.split("/")
    # An asterisk begins ONNX Runtime's mark of an address in memory.
    if not location or {"", ".", ".."} & set(parts) or {"\0", "*"} & set(location):
        raise ModelFileError(
            f"external data {location!r:.120}: allowed is a relative path below the model's folder"
        )
    at = -1
    try:
        at = os.open(folder, _ONLY | os.O_DIRECTORY)
        for part in parts[:-1]:
            inner = os.open(part, _ONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        file = os.open(parts[-1], _ONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}; links are not followed"
        raise ModelFileError(f"external data {location!r:.120} {reason}") from error
    finally:
        if at >= 0:
            os.close(at)
    return _read(file, location, most)


def gathered(folder: Path | None, tensors: Sequence[OnnxTensor], most: int) -> dict[str, bytes]:
    """Read all outside data, each file once. Raises `ModelFileError`."""
    found: dict[str, bytes] = {}
    for tensor in tensors:
        location = tensor.location
        if location is None:
            continue
        if folder is None:
            raise ModelFileError(f"tensor {tensor.name:.80} is in {location:.80}, which is absent")
        if location not in found:
            found[location] = _outside(folder, location, most)
            most -= len(found[location])
        end, size = tensor.offset + tensor.bytes, len(found[location])
        if end > size:
            held = f"{location:.80}, which has {size:,}"
            raise ModelFileError(f"tensor {tensor.name:.80} ends at byte {end:,} of {held}")
    return found


def only_onnx(data: bytes, name: str) -> None:
    """Raise `ModelFileError` that names TorchScript, a pickle, or another known format."""
    found = [what for at, mark, what in _KINDS if data[at : at + len(mark)] == mark]
    if data.startswith(b"PK\x03\x04"):
        members: list[str] = []
        with suppress(zipfile.BadZipFile, ValueError, NotImplementedError):
            members = zipfile.ZipFile(io.BytesIO(data)).namelist()
        inner = {member.partition("/")[2] for member in members}
        if "constants.pkl" in inner:
            found = ["TorchScript, whose pickles run code"]
        elif "archive_format" in inner:
            found = ["a torch.export archive"]
        else:
            pickled = any(member.endswith(".pkl") for member in members)
            found = ["a pickle of PyTorch" if pickled else "an archive of another kind"]
    if found:
        raise ModelFileError(f"{name} is {found[0]}, and is not loaded; a program is an ONNX file")
