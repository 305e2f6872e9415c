"""One layer of an image: a reproducible tar without timestamps.

It does not depend on the clock, user, umask, locale or order of a folder: names are sorted, times
are 0, owners are root, modes are one of four.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from ..base.errors import ModelFileError
from .store import Descriptor, Store

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
LEVEL = 6
"""gzip's level: 9 takes three times as long for 1 % less."""
MOST_FILES = 100_000
MOST_BYTES = 4 << 30
"""Limits of a package's unpacked size; torch with CUDA has 2 GB."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, a folder or a link of a layer."""

    read: Callable[[], bytes] | None = None
    """Returns a file's bytes; None for a folder or a link."""
    link: str = ""
    mode: int = 0o644
    owner: int = 0


class _Hashed:
    """A file that hashes the data written through it."""

    def __init__(self, target: BinaryIO | gzip.GzipFile) -> None:
        self._target, self.hash = target, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self._target.write(data)


def pack(store: Store, entries: Mapping[str, Entry]) -> tuple[Descriptor, str]:
    """Return (the layer in the store, digest of the tar inside it). Names are relative to the
    root."""
    whole = dict(entries)
    for name in entries:
        for parent in list(PurePosixPath(name).parents)[:-1]:
            whole.setdefault(str(parent), Entry(mode=0o755))
    path = store.root / "tmp" / f"layer-{hashlib.sha256(repr(sorted(whole)).encode()).hexdigest()}"
    with store.writing(), path.open("wb") as file:
        packed = gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=file, mtime=0)
        hashed = _Hashed(packed)
        with packed, tarfile.open(fileobj=hashed, mode="w|", format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            for name, entry in sorted(whole.items()):
                _add(tar, name, entry)
    try:
        return store.put_file(path, LAYER_TYPE), f"sha256:{hashed.hash.hexdigest()}"
    finally:
        path.unlink()


def _add(tar: tarfile.TarFile, name: str, entry: Entry) -> None:
    one = tarfile.TarInfo(name)
    one.mode, one.uid, one.gid = entry.mode, entry.owner, entry.owner
    if entry.read is not None:
        data = entry.read()
        one.size = len(data)
        tar.addfile(one, io.BytesIO(data))
        return
    one.type, one.linkname = (tarfile.SYMTYPE if entry.link else tarfile.DIRTYPE), entry.link
    if entry.link:
        one.mode = 0o777
    tar.addfile(one)


def folder(root: Path, below: str) -> dict[str, Entry]:
    """Return the files of a folder, without compiled Python."""
    return {
        f"{below}/{path.relative_to(root).as_posix()}": Entry(path.read_bytes)
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def wheel(path: Path, below: str) -> dict[str, Entry]:
    """Return the entries that a wheel installs next to Python's own packages.

    Raises `ModelFileError` for a hostile one.
    """
    try:
        found = {}
        archive = zipfile.ZipFile(path)
        infos = [info for info in archive.infolist() if not info.is_dir()]
        _bounded(path.name, [info.file_size for info in infos])
        for info in infos:
            parts = _parts(path.name, info.filename)
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue  # Scripts, headers and manual pages: not imported.
                parts = parts[2:]

            def read(info: zipfile.ZipInfo = info) -> bytes:
                return archive.read(info)

            found["/".join([below, *parts])] = Entry(read)
    except (OSError, zipfile.BadZipFile, EOFError, IndexError) as error:
        raise ModelFileError(f"{path.name} is no wheel: {error}") from None
    return found


def debian(name: str, package: bytes) -> dict[str, Entry]:
    """Unpack a Debian package without manuals; keep only the licence of its documents.

    Raises `ModelFileError` if it is not such a package.
    """
    found = {}
    try:
        data = dict(_members(package))["data.tar.xz"]
        with tarfile.open(fileobj=io.BytesIO(lzma.decompress(data))) as tar:
            members = tar.getmembers()
            _bounded(name, [one.size for one in members])
            for one in members:
                path = "/".join(_parts(name, one.name)) if one.name not in (".", "./") else ""
                if not path or _left_out(path) or one.isdir():
                    continue
                if one.issym():
                    found[path] = Entry(link=one.linkname)
                    continue
                file = tar.extractfile(one)  # Follows a hard link.
                if file is None:
                    raise ModelFileError(f"{name} holds {one.name:.80}, which is no file")
                mode = 0o755 if one.mode & 0o100 else 0o644
                found[path] = Entry(file.read().__bytes__, mode=mode)
    except (KeyError, lzma.LZMAError, tarfile.TarError, OSError, ValueError) as error:
        raise ModelFileError(f"{name} is no package of Debian: {error}") from None
    return found


def _members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of each member of an `ar` archive, as in `man 5 ar`."""
    if archive[:8] != b"!<arch>\n":
        raise ValueError("it does not begin as an archive does")
    place = 8
    while place + 60 <= len(archive):
        head = archive[place : place + 60]
        size = int(head[48:58])
        if size < 0 or head[58:] != b"`\n":
            raise ValueError("a member's head is not one")
        yield head[:16].decode().strip().rstrip("/"), archive[place + 60 : place + 60 + size]
        place += 60 + size + size % 2


def _left_out(path: str) -> bool:
    documents = path.startswith("usr/share/doc/") and not path.endswith("/copyright")
    return documents or path.startswith(("usr/share/man/", "usr/share/lintian/", "usr/share/bug/"))


def _parts(where: str, name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ModelFileError(f"{where} holds {name!r:.80}, which leaves its folder")
    return path.parts


def _bounded(where: str, sizes: list[int]) -> None:
    if len(sizes) > MOST_FILES or sum(sizes) > MOST_BYTES:
        raise ModelFileError(f"{where} unpacks to more than {MOST_BYTES:,} bytes")
