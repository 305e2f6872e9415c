"""Storage of files in one folder: contents under their ids, metadata in sqlite.

A lock ensures that the folder belongs to one server at a time. It is readable by its user only and
holds nothing under a name that a client chose.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO

from ...base.errors import NotFound, OptionError, RateLimited, TooLarge, file_errors
from ..database import Database, StoreFailed

log = logging.getLogger("headrace.server.files")

MOST_FILES = 10_000
"""Maximum files of one owner."""
PART = ".part"
"""Name suffix of a file that is still being received."""
SCHEMA = """
create table if not exists files (
    id text primary key, owner text not null, filename text not null, purpose text not null,
    bytes integer not null, created integer not null, expires integer
);
create index if not exists files_by_owner on files (owner, created);
create table if not exists batches (
    id text primary key, owner text not null, status text not null, created integer not null,
    record blob not null
);
create index if not exists batches_by_owner on batches (owner, created);
"""


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created: int
    expires: int | None = None


class FileStore:
    """All files of one server."""

    def __init__(
        self,
        folder: Path,
        *,
        quota: int,
        max_file: int,
        failed: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folder. `quota`: bytes per owner; `max_file`: bytes per file.

        Raises `OptionError` if the folder cannot be used.
        """
        self._folder = folder
        self._quota = quota
        self._max_file = max_file
        self._failed = failed
        self._clock = clock
        self._arriving: Counter[str] = Counter()
        """Bytes being received, by owner."""
        self.growing: Counter[str] = Counter()
        """Bytes of batch results that are not files yet, by owner."""
        with file_errors(OptionError, f"the folder {folder} cannot be used", "files"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(folder)
            for left in folder.glob(f"*{PART}"):
                left.unlink()
        self.base = Database(folder / "index.db", SCHEMA, option="files", failed=failed)

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content, present or future."""
        assert "/" not in file_id
        return self._folder / file_id

    async def receive(self, owner: str) -> Arriving:
        """Begin to receive a new file. Raises `RateLimited` and `StoreFailed`."""
        await self.purge()
        count, used = await self.base.run(lambda base: _used(base, owner), "file_read")
        if count >= MOST_FILES:
            raise RateLimited(f"at most {MOST_FILES} files are kept", retry_after=60.0)
        return Arriving(self, owner, used + self.growing[owner])

    async def add(self, file: StoredFile, *, within_quota: bool = False) -> None:
        """Register the content at `path` as a file; may be repeated.

        Raises `StoreFailed`, and `TooLarge` if `within_quota` is set and the quota is exceeded.
        """
        row = astuple(file)
        growing = self.growing[file.owner]

        def write(base: sqlite3.Connection) -> None:
            # Checked here: another upload may have ended while this one arrived.
            if within_quota and _used(base, file.owner)[1] + growing + file.bytes > self._quota:
                raise self._over_quota()
            base.execute("insert or replace into files values (?,?,?,?,?,?,?)", row)

        await self.base.run(write, "file_write")

    async def check_quota(self, owner: str, *, param: str, times: int = 1) -> None:
        """Raise `TooLarge` if the owner's files and coming results fill `times` quotas; also
        `StoreFailed`."""
        _, used = await self.base.run(lambda base: _used(base, owner), "file_read")
        if used + self.growing[owner] >= times * self._quota:
            raise self._over_quota(param)

    def _over_quota(self, param: str = "file") -> TooLarge:
        return TooLarge(
            f"the files of one key may have {self._quota} bytes together (file_quota); delete some",
            param=param,
            code="quota_exceeded",
        )

    async def get(self, file_id: str, owner: str) -> StoredFile:
        """Return a file's metadata. Raises `NotFound` and `StoreFailed`."""

        def read(base: sqlite3.Connection) -> StoredFile | None:
            row = base.execute(
                "select * from files where id = ? and owner = ? and "
                "(expires is null or expires > ?)",
                (file_id, owner, self._clock()),
            ).fetchone()
            return None if row is None else StoredFile(*row)

        found = await self.base.run(read, "file_read")
        if found is None:
            raise NotFound(f"there is no file {file_id[:128]!r}", param="file_id")
        return found

    async def readable(self, file_id: str, owner: str, most: int) -> Path:
        """Return the path of a file's content, of at most `most` bytes. Raises `NotFound`,
        `TooLarge` and `StoreFailed`."""
        file = await self.get(file_id, owner)
        if file.bytes > most:
            raise TooLarge(
                f"{file.id} has {file.bytes:,} bytes; at most {most:,} are taken", param="file_id"
            )
        return self.path(file.id)

    async def listed(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, newest: bool
    ) -> tuple[list[StoredFile], bool]:
        """List (files after the id `after`, whether more follow)."""
        order = "desc" if newest else "asc"

        def read(base: sqlite3.Connection) -> list[StoredFile]:
            rows = base.execute(
                "select * from files where owner = ? and (? is null or purpose = ?) and "
                f"(expires is null or expires > ?) order by created {order}, rowid {order}",
                (owner, purpose, purpose, self._clock()),
            )
            return [StoredFile(*row) for row in rows]

        found = await self.base.run(read, "file_read")
        if after is not None:
            place = next((i for i, file in enumerate(found) if file.id == after), None)
            if place is None:
                raise NotFound(f"there is no file {after[:128]!r}", param="after")
            found = found[place + 1 :]
        return found[:limit], len(found) > limit

    async def delete(self, file_id: str, owner: str) -> bool:
        def drop(base: sqlite3.Connection) -> bool:
            found = base.execute("delete from files where id = ? and owner = ?", (file_id, owner))
            return found.rowcount > 0

        gone = await self.base.run(drop, "file_write")
        if gone:
            await self._drop_content(file_id)
        return gone

    async def purge(self) -> None:
        """Remove expired files. Raises `StoreFailed`."""
        now = self._clock()

        def drop(base: sqlite3.Connection) -> list[str]:
            rows = base.execute("select id from files where expires <= ?", (now,)).fetchall()
            if rows:
                base.execute("delete from files where expires <= ?", (now,))
            return [row[0] for row in rows]

        for file_id in await self.base.run(drop, "file_write"):
            await self._drop_content(file_id)

    async def _drop_content(self, file_id: str) -> None:
        """Remove the content of a file whose row is gone; on failure the space stays in use."""
        try:
            await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)
        except OSError as error:
            log.error(
                "a content could not be removed", extra={"file": file_id, "reason": str(error)}
            )
            self._failed("file_write")

    def close(self) -> None:
        self.base.close()
        if self._lock is not None:
            self._lock.close()


class Arriving:
    """File being received: `write` its pieces, then `keep` it; `close` in any case."""

    def __init__(self, store: FileStore, owner: str, used: int) -> None:
        self.id = f"file-{secrets.token_hex(12)}"
        self.size = 0
        self._store = store
        self._owner = owner
        self._used = used
        self._part = store.path(self.id + PART)
        self._file: IO[bytes] | None = None

    async def write(self, piece: bytes) -> None:
        """Append a piece. Raises `TooLarge` above a limit, `StoreFailed` if the disk is full or
        broken."""
        store = self._store
        self.size += len(piece)
        store._arriving[self._owner] += len(piece)
        if self.size > store._max_file:
            raise TooLarge(
                f"a file may have {store._max_file} bytes (max_file)",
                param="file",
                code="file_too_large",
            )
        if self._used + store._arriving[self._owner] > store._quota:
            raise store._over_quota()
        try:
            await asyncio.to_thread(self._append, piece)
        except OSError as error:
            raise self._failure(error) from None

    def _append(self, piece: bytes) -> None:
        if self._file is None:
            handle = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._file = os.fdopen(handle, "wb")
        self._file.write(piece)

    async def keep(self, filename: str, purpose: str, expires: int | None) -> StoredFile:
        """Store the received file. Raises `StoreFailed` and `TooLarge`; then nothing is kept."""
        created = int(self._store._clock())
        stored = StoredFile(self.id, self._owner, filename, purpose, self.size, created, expires)

        def settle() -> None:
            self._append(b"")
            assert self._file is not None
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self._store.path(self.id))

        try:
            await asyncio.to_thread(settle)
        except OSError as error:
            raise self._failure(error) from None
        try:
            await self._store.add(stored, within_quota=True)
        except (StoreFailed, TooLarge):
            self._store.path(self.id).unlink(missing_ok=True)
            raise
        return stored

    def _failure(self, error: OSError) -> StoreFailed:
        log.error("a file could not be written", extra={"reason": str(error)})
        self._store._failed("file_write")
        return StoreFailed("the file cannot be stored now", retry_after=10.0)

    def close(self) -> None:
        self._store._arriving[self._owner] -= self.size
        if not self._store._arriving[self._owner]:
            del self._store._arriving[self._owner]
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)


def _used(base: sqlite3.Connection, owner: str) -> tuple[int, int]:
    """Return (files, bytes) of an owner, without those being received."""
    row = base.execute(
        "select count(*), coalesce(sum(bytes), 0) from files where owner = ?", (owner,)
    ).fetchone()
    return int(row[0]), int(row[1])


def _lock(folder: Path) -> IO[bytes] | None:
    """Lock the folder until the file is closed; the system releases it when the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    lock = (folder / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise OptionError(f"the folder {folder} is used by another server", param="files") from None
    return lock
