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
from .onnx import Tensor

MOST_BYTES = 2**31 - 1
"""Largest protobuf message that libraries read."""
_KINDS = (
    (0, b"\x80", "a pickle, which runs code as it is read"),
    (4, b"ORTM", "an ONNX Runtime dump (.ort), which is not checked when loaded"),
    (4, b"TFL3", "a TensorFlow Lite file"),
    (0, b"GGUF", "a language model: `headrace serve`"),
)
_INSTEAD = "; a program is an ONNX file or a torch.export archive (.pt2)"


def read(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file. Raises `InvalidRequest` if it cannot be, `ModelFileError` if it is too
    large."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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


def outside(folder: Path, location: str, most: int) -> bytes:
    """Read the data file that tensors name, below `folder`. Raises `ModelFileError`."""
    parts = location.split("/")
    if not location or location.startswith("/") or {"", ".", ".."} & set(parts) or "\0" in location:
        raise ModelFileError(
            f"external data {location!r:.120}: allowed is a relative path below the model's folder"
        )
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=at)
            os.close(at)
            at = inner
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return _read(os.open(parts[-1], flags, dir_fd=at), location, most)
    except OSError as error:
        raise ModelFileError(
            f"external data {location!r:.120} cannot be read: {error.strerror}; links are not "
            "followed"
        ) from error
    finally:
        os.close(at)


def gathered(folder: Path | None, tensors: Sequence[Tensor], most: int) -> dict[str, bytes]:
    """Read all outside data, each file once. Raises `ModelFileError`."""
    found: dict[str, bytes] = {}
    for tensor in tensors:
        location = tensor.location
        if location is None:
            continue
        if folder is None:
            raise ModelFileError(f"tensor {tensor.name:.80} is in {location:.80}, which is absent")
        if location not in found:
            found[location] = outside(folder, location, most)
            most -= len(found[location])
        if tensor.offset + tensor.bytes > len(found[location]):
            raise ModelFileError(
                f"tensor {tensor.name:.80} ends at byte {tensor.offset + tensor.bytes:,} of "
                f"{location:.80}, which has {len(found[location]):,}"
            )
    return found


def kind(data: bytes, name: str) -> str:
    """Tell `onnx` from `exported`. Raises `ModelFileError` for TorchScript, pickles and others."""
    for at, mark, what in _KINDS:
        if data[at : at + len(mark)] == mark:
            raise ModelFileError(f"{name} is {what}, and is not loaded{_INSTEAD}")
    if not data.startswith(b"PK\x03\x04"):
        return "onnx"
    members: list[str] = []
    with suppress(zipfile.BadZipFile, ValueError, NotImplementedError):
        members = zipfile.ZipFile(io.BytesIO(data)).namelist()
    inner = {member.partition("/")[2] for member in members}
    if "constants.pkl" in inner or any(member.startswith("code/") for member in inner):
        raise ModelFileError(f"{name} is TorchScript, and is not loaded: its pickles run{_INSTEAD}")
    if "archive_format" in inner:
        return "exported"
    if any(member.endswith(".pkl") for member in members):
        raise ModelFileError(f"{name} is a pickle of PyTorch, and is not loaded{_INSTEAD}")
    raise ModelFileError(f"{name} is an archive of another kind{_INSTEAD}")
