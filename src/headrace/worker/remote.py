"""Blocks of KV in a store that other machines share: a Redis or Valkey server, or an object store.

A block is one value in the form of a disk tier's file, named `headrace/<engine>/<tenant>/<name>`.
The store's content is unknown until asked: `seek` asks for a whole prefix at once. The lifetime of
values is the server's policy (`maxmemory-policy allkeys-lru`, a bucket's lifecycle).

A store that fails is not used for a minute; blocks are computed meanwhile.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect
from collections.abc import Container, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..base.errors import OptionError
from ..base.extras import needing
from .seal import HEAD_BYTES, TAG_BYTES, BlockForm, Plain
from .stack import Bytes

log = logging.getLogger("headrace.cache")

SECONDS = 2.0
"""Seconds that one call may take."""
MOST_KNOWN = 1 << 18
"""Number of keys of each group that are remembered as present."""
_TRY_AGAIN = 60.0


class SharedStore(Protocol):
    """A remote store's three calls, and one that empties it. Each raises its library's errors."""

    def exists(self, names: list[str]) -> list[bool]: ...
    def read(self, name: str, most: int) -> bytes:
        """Return at most `most` bytes; empty if there is no value, or none of bytes."""

    def write(self, name: str, data: bytes) -> None: ...
    def forget(self, folder: str) -> None:
        """Remove all below `folder`."""


class RemoteTier:
    """Tier (`mover.Tier`) over a store. Thread-safe as far as the store is."""

    rank = 1
    nbytes = 0
    """Unknown size: the store counts for all its users."""

    def __init__(self, store: SharedStore, form: str | BlockForm, groups: int) -> None:
        """Use a store; `form` as of a `DiskTier`."""
        self._store = store
        self._form = Plain(form) if isinstance(form, str) else form
        self._known: list[dict[bytes, None]] = [{} for _ in range(groups)]
        self._refused_until = 0.0
        self._said = False

    @property
    def answers(self) -> bool:
        """Tell whether asking is worthwhile now."""
        return time.monotonic() >= self._refused_until

    def exists(self, group: int) -> Container[bytes]:
        return self._known[group]

    def seek(self, wanted: Sequence[tuple[bytes, int, str]]) -> list[bool]:
        """Ask for these (key, group, tenant), and remember which are there."""
        if not self.answers:
            return [False] * len(wanted)
        try:
            found = self._store.exists([self._name(*one) for one in wanted])
        except Exception as refused:  # noqa: BLE001 - a library's own
            self._refused(refused)
            return [False] * len(wanted)
        self._answered()
        for (key, group, _), there in zip(wanted, found, strict=True):
            if there:
                self._note(key, group)
        return found

    def read(self, key: bytes, group: int, tenant: str, size: int, age: int) -> Bytes | None:
        data = b""
        if self.answers:
            try:
                data = self._store.read(self._name(key, group, tenant), HEAD_BYTES + size + 1)
                self._answered()
            except Exception as refused:  # noqa: BLE001
                self._refused(refused)
        if len(data) != HEAD_BYTES + size:
            self._known[group].pop(key, None)
            return None
        whole = memoryview(bytearray(data + bytes(TAG_BYTES)))
        block = self._form.opened(key, group, tenant, whole)
        if block is None:
            log.warning("%s is damaged: it is computed again", self._name(key, group, tenant))
            self._known[group].pop(key, None)
            return None
        return block

    def write(
        self, key: bytes, group: int, tenant: str, parts: Sequence[memoryview], age: int
    ) -> bool:
        if not self.answers:
            return False
        try:
            data = b"".join(self._form.closed(key, group, tenant, parts))
            self._store.write(self._name(key, group, tenant), data)
        except Exception as refused:  # noqa: BLE001
            self._refused(refused)
            return False
        self._answered()
        self._note(key, group)
        return True

    def expect(self, key: bytes, group: int, tenant: str) -> None:
        """Do nothing: asking twice would mean waiting twice."""

    def drop(self, key: bytes, group: int, tenant: str) -> None:
        """Forget that a block is there: the next worker that computes it writes it again."""
        self._known[group].pop(key, None)

    def look(self, *, again: bool = False) -> None:
        """Do nothing: other machines' blocks are asked for when needed."""

    def forget(self) -> None:
        for known in self._known:
            known.clear()
        try:
            self._store.forget(f"headrace/{self._form.folder}")
        except Exception as refused:  # noqa: BLE001
            self._refused(refused)

    def _name(self, key: bytes, group: int, tenant: str) -> str:
        return f"headrace/{self._form.folder}/{tenant}/{key.hex()}-{group}"

    def _note(self, key: bytes, group: int) -> None:
        known = self._known[group]
        known[key] = None
        if len(known) > MOST_KNOWN:
            del known[next(iter(known))]

    def _answered(self) -> None:
        """Log the next failure of the store again."""
        self._said = False

    def _refused(self, refused: Exception) -> None:
        self._refused_until = time.monotonic() + _TRY_AGAIN
        if not self._said:
            self._said = True
            log.warning(
                "the remote context cache fails (%s: %.200s); it is tried again each minute",
                type(refused).__name__,
                refused,
            )


class RedisStore:
    """Store in a Redis or Valkey server."""

    def __init__(self, url: str) -> None:
        with needing(f"{urlsplit(url).scheme}:// needs", "cache", param="context_cache_remote"):
            import redis

        self._reply_error = redis.ResponseError
        self._redis: Any = redis.Redis.from_url(
            url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS
        )

    def exists(self, names: list[str]) -> list[bool]:
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.exists(name)
        return [bool(there) for there in pipeline.execute()]

    def read(self, name: str, most: int) -> bytes:
        try:
            # A range, so that no foreign value is longer than the block.
            return bytes(self._redis.getrange(name, 0, most - 1))
        except self._reply_error as fault:
            if not str(fault).startswith("WRONGTYPE"):
                raise
            return b""  # A list, or another value that is no string: of this key alone.

    def write(self, name: str, data: bytes) -> None:
        self._redis.set(name, data)

    def forget(self, folder: str) -> None:
        names = list(self._redis.scan_iter(match=f"{folder}/*", count=1000))
        for at in range(0, len(names), 1000):
            self._redis.unlink(*names[at : at + 1000])


class ObjectStore:
    """Store in a bucket, or in a folder that machines share, by an fsspec URL."""

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]  # Local: comes with huggingface_hub, and is slow to import.

        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def exists(self, names: list[str]) -> list[bool]:
        """Search by halves, since each question is a request. If a block of a prefix is there, the
        blocks before it most likely are too. The names come by depth, in each group."""
        self._files.invalidate_cache()
        found: set[str] = set()
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(name.rpartition("-")[2], []).append(name)
        for ordered in groups.values():
            there = bisect(
                ordered, False, key=lambda name: not self._files.exists(self._path(name))
            )
            found.update(ordered[:there])
        return [name in found for name in names]

    def read(self, name: str, most: int) -> bytes:
        try:
            return bytes(self._files.cat_file(self._path(name), start=0, end=most))
        except (FileNotFoundError, IsADirectoryError):
            return b""

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, data)

    def forget(self, folder: str) -> None:
        if self._files.exists(self._path(folder)):
            self._files.rm(self._path(folder), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


SCHEMES: dict[str, type[RedisStore] | type[ObjectStore]] = {
    "redis": RedisStore,
    "rediss": RedisStore,
    "unix": RedisStore,
    "s3": ObjectStore,
    "gs": ObjectStore,
    "az": ObjectStore,
    "file": ObjectStore,
    "memory": ObjectStore,
}


def open_store(url: str) -> SharedStore:
    """Open the store of a URL. Raises `OptionError` and `PackageAbsent`."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise OptionError(
            f"{scheme or url!r} is no store of blocks; {', '.join(SCHEMES)} are",
            param="context_cache_remote",
        )
    try:
        store: SharedStore = SCHEMES[scheme](url)
    except ImportError as missing:  # fsspec names the package that it lacks.
        raise OptionError(
            f"nothing here speaks {scheme}: {missing}", param="context_cache_remote"
        ) from None
    except ValueError as wrong:
        raise OptionError(f"{url!r}: {wrong}", param="context_cache_remote") from None
    return store
