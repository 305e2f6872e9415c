"""Content of a block's file, protected against confusion by a digest or a seal.

    magic, key, bytes of the block, digest or tag, nonce or zeros      64 bytes; the block

The digest (XXH3, 128 bits) covers name and bytes. It finds damage, not malice: anyone who can write
here could also make a SHA-256, which takes longer than reading the bytes.

A seal is AES-256-GCM over bytes and name, with a key of the tenant and a nonce drawn for each file.
Without the key the block can be neither read nor made. Keys are files of 32 bytes in a folder of
their own, made when a tenant's first block is kept. Removing a key makes all blocks that it sealed
unreadable, on each disk and in each store, from the next read on.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from xxhash import xxh3_128

from ..base.errors import OptionError
from ..base.extras import needing
from .stack import Bytes

_PLAIN, _SEALED = b"HRBLOCK2", b"HRSEALED"
_HEAD = struct.Struct("<8s16sQ16s12s4x")
HEAD_BYTES = _HEAD.size
TAG_BYTES = 16
"""Bytes after a block that a reader leaves free for `BlockForm.opened`."""
_KEY_BYTES = 32


class BlockForm(Protocol):
    """Writer and reader of a block file's content."""

    folder: str
    """Folder name of the engine: blocks of another form lie apart."""

    def closed(
        self, key: bytes, group: int, tenant: str, parts: Sequence[memoryview]
    ) -> list[Bytes]:
        """Return all of the file, in pieces."""

    def opened(self, key: bytes, group: int, tenant: str, content: memoryview) -> Bytes | None:
        """Return the block in `content`, or None if it is not the block of that name.

        `content` is a writable file image followed by `TAG_BYTES` of any value.
        """


class Plain:
    """Form of files with a digest."""

    def __init__(self, engine: str) -> None:
        self.folder = engine

    def closed(
        self, key: bytes, group: int, tenant: str, parts: Sequence[memoryview]
    ) -> list[Bytes]:
        return [block_head(self.folder, key, group, parts), *parts]

    def opened(self, key: bytes, group: int, tenant: str, content: memoryview) -> Bytes | None:
        data = content[HEAD_BYTES:-TAG_BYTES]
        fine = content[:HEAD_BYTES] == block_head(self.folder, key, group, [data])
        return data if fine else None


class Sealed:
    """Form of files that only a holder of the tenant's key can read or make."""

    def __init__(self, engine: str, keys: TenantKeys) -> None:
        self.folder = xxh3_128(f"sealed {engine}".encode()).hexdigest()
        self._keys = keys

    def closed(
        self, key: bytes, group: int, tenant: str, parts: Sequence[memoryview]
    ) -> list[Bytes]:
        """Return all of the file. Raises `OSError` if there can be no key."""
        nonce, plain = os.urandom(12), b"".join(parts)
        sealed = self._keys.made(tenant).encrypt(nonce, plain, self._name(key, group, tenant))
        head = _HEAD.pack(_SEALED, key, len(plain), sealed[-TAG_BYTES:], nonce)
        return [head, memoryview(sealed)[:-TAG_BYTES]]

    def opened(self, key: bytes, group: int, tenant: str, content: memoryview) -> Bytes | None:
        cipher = self._keys.kept(tenant)
        magic, named, _, tag, nonce = _HEAD.unpack(content[:HEAD_BYTES])
        if cipher is None or magic != _SEALED or named != key:
            return None
        content[-TAG_BYTES:] = tag
        try:
            opened: bytes = cipher.decrypt(
                nonce, content[HEAD_BYTES:], self._name(key, group, tenant)
            )
        except self._keys.refusal:
            return None
        return opened

    def _name(self, key: bytes, group: int, tenant: str) -> bytes:
        return f"{self.folder} {tenant} {group} ".encode() + key


class TenantKeys:
    """A folder with a key for each tenant: `<tenant>.key`. Processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Open the folder. Raises `OptionError` if it is unusable, `PackageAbsent` without a
        cipher."""
        with needing("sealed blocks need", "cache", param="context_cache_keys"):
            import cryptography.exceptions
            import cryptography.hazmat.primitives.ciphers.aead as ciphers
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as refused:
            raise OptionError(
                f"{folder} cannot hold keys: {refused.strerror}", param="context_cache_keys"
            ) from None
        self._folder, self._cipher = folder, ciphers.AESGCM
        self.refusal: type[Exception] = cryptography.exceptions.InvalidTag
        """Exception of a cipher whose key did not seal the data."""
        self._known: dict[str, tuple[tuple[int, int], Any]] = {}

    def kept(self, tenant: str) -> Any:
        """Return the tenant's cipher; None if there is no key, or none any more."""
        path = self._folder / f"{tenant}.key"
        try:
            state = path.stat()
            seen = (state.st_ino, state.st_mtime_ns)
            known = self._known.get(tenant)
            if known is None or known[0] != seen:
                known = self._known[tenant] = seen, self._cipher(path.read_bytes())
        except (OSError, ValueError):  # ValueError: of another length.
            self._known.pop(tenant, None)
            return None
        return known[1]

    def made(self, tenant: str) -> Any:
        """Return the tenant's cipher; make a key if there is no key yet. Raises `OSError`."""
        found = self.kept(tenant)
        if found is None:
            path = self._folder / f"{tenant}.key"
            fresh = self._folder / f"{tenant}.{os.urandom(4).hex()}.tmp"
            file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(file, os.urandom(_KEY_BYTES))
                os.fsync(file)
                with suppress(FileExistsError):  # Another process was first.
                    os.link(fresh, path)
            finally:
                os.close(file)
                fresh.unlink()
            found = self.kept(tenant)
        if found is None:
            raise PermissionError(errno.EACCES, f"{tenant}.key holds no key")
        return found


def forget_keys(folder: Path, tenant: str) -> int:
    """Remove the keys of tenants that begin with `tenant`; return their number."""
    found = [path for path in folder.glob("*.key") if path.name.startswith(tenant)]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def block_head(engine: str, key: bytes, group: int, parts: Sequence[memoryview]) -> bytes:
    """Return the first bytes of a file with a digest."""
    digest = xxh3_128(f"{engine} {group} ".encode() + key)
    size = 0
    for part in parts:
        digest.update(part)
        size += part.nbytes
    return _HEAD.pack(_PLAIN, key, size, digest.digest(), b"")


def intact(engine: str, key: bytes, group: int, data: memoryview) -> bool:
    """Tell whether `data`, a whole file, is the block of that name, as far as can be checked
    without its key."""
    if data.nbytes < HEAD_BYTES:
        return False
    magic, named, size, _, _ = _HEAD.unpack(data[:HEAD_BYTES])
    if magic == _SEALED:
        return bool(named == key and size == data.nbytes - HEAD_BYTES)
    return block_head(engine, key, group, [data[HEAD_BYTES:]]) == data[:HEAD_BYTES]
