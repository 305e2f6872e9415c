"""Blocks of KV as files: the tier that outlives the process.

    <root>/<engine>/<tenant>/<key>-<group>      content: `seal`

A name says what its file must hold: `engine` stands for everything that KV follows from
(`kv.prefix.root_of`), `key` for the content. A file gets its name after it is complete. A file that
is torn, damaged, cut off or under a wrong name is dropped when it is read. It is not flushed to the
disk: blocks lost in a power cut are computed again.

Any number of processes share a folder. Each knows the files of its last look; a file that another
process has removed since is a failed read. When `limit` is passed, the tenant that holds most loses
its least recently used blocks, so that no tenant can push out the blocks of others. So does a
tenant that holds more than a `quota`. Times are kept to the minute; within a minute the deepest
blocks of a prefix are the oldest.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .seal import HEAD_BYTES, TAG_BYTES, BlockForm, Plain, intact
from .stack import Bytes

log = logging.getLogger("headrace.cache")

FOLDER = "kv"
_TEMPORARY = ".tmp"
_KEPT = 0.9
"""Share of the limit that is left after making room."""
_LOOK_AGAIN = 10.0
"""Seconds between two looks at other processes' files."""
_TRY_AGAIN = 60.0
"""Seconds without writes after the disk refused one."""
_DAY = 86_400.0
_MOST_PARTS = 512
"""Parts of one system call; Linux takes 1,024."""

_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags for reading. `O_NONBLOCK`: opening a planted FIFO must not block."""
_WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
BLOCK_NAME = re.compile("[0-9a-f]{32}/[0-9a-f]{16}/[0-9a-f]{32}-[0-9]{1,3}")
"""Path of a block below the root, as text."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One file of the folder."""

    path: Path
    tenant: str
    nbytes: int
    used: float
    """Unix time."""


class DiskTier:
    """A tier for one engine. Thread-safe; the names and sizes that it remembers may be stale."""

    rank = 0

    def __init__(
        self,
        root: Path,
        form: str | BlockForm,
        groups: int,
        limit: int,
        quota: int | None = None,
    ) -> None:
        """Open the tier. `form`: of the files, or the engine's name for files with a digest.

        `limit`: bytes of all engines together; `quota`: largest number of bytes of one tenant.
        """
        self._form = Plain(form) if isinstance(form, str) else form
        self.root = root / FOLDER
        self.folder = self.root / self._form.folder
        self.limit = limit
        self.quota = quota
        self._held: Counter[str] = Counter()
        """Bytes of each tenant, as far as this process knows."""
        self.nbytes = 0
        self.known: list[set[bytes]] = [set() for _ in range(groups)]
        self._mine = threading.local()
        self._refused_until = 0.0
        self._said = False
        self._looked = -_LOOK_AGAIN

    def exists(self, group: int) -> Container[bytes]:
        """Return the keys that were here at the last look."""
        return self.known[group]

    def read(self, key: bytes, group: int, tenant: str, size: int, age: int) -> Bytes | None:
        """Return the block's `size` bytes, valid until this thread reads again, or None.

        None if there is no such block that can be trusted; a damaged file is removed.
        """
        path = self._path(key, group, tenant)
        # The whole block, into a buffer that stays in the processor's cache: a digest piece by
        # piece takes three times as long as one of the whole, and longer than reading.
        whole = self._buffer(HEAD_BYTES + size + TAG_BYTES)
        try:
            file = os.open(path, _READING)
            try:
                got = os.preadv(file, [whole[:-TAG_BYTES]], 0)
            finally:
                os.close(file)
        except OSError:
            self.known[group].discard(key)
            return None
        data = None
        if got == HEAD_BYTES + size:
            data = self._form.opened(key, group, tenant, whole)
        if data is None:
            log.warning("%s is damaged, or its key is gone: it is removed and computed again", path)
            self.drop(key, group, tenant)
            return None
        with suppress(OSError):
            _touch(path, age)
        return data

    def expect(self, key: bytes, group: int, tenant: str) -> None:
        """Let the system prefetch a file that `read` will soon ask for."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                file = os.open(self._path(key, group, tenant), _READING)
                try:
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
                finally:
                    os.close(file)

    def write(
        self, key: bytes, group: int, tenant: str, parts: Sequence[memoryview], age: int
    ) -> bool:
        """Write the block. Returns False if the disk refuses; the log says so once."""
        if time.monotonic() < self._refused_until:
            return False
        try:
            closed = self._form.closed(key, group, tenant, parts)
            _put(self._path(key, group, tenant), closed, age)
        except OSError as refused:
            self._refused(refused)
            return False
        self.known[group].add(key)
        size = HEAD_BYTES + sum(part.nbytes for part in parts)
        self.nbytes += size
        self._held[tenant] += size
        if self.nbytes > self.limit or self._held[tenant] > (self.quota or self.limit):
            self.make_room()
        return True

    def drop(self, key: bytes, group: int, tenant: str) -> None:
        """Remove one block."""
        self.known[group].discard(key)
        with suppress(OSError):
            self._path(key, group, tenant).unlink()

    def look(self, *, again: bool = False) -> None:
        """List the files, unless that was done in the last `_LOOK_AGAIN` seconds; `again`:
        always."""
        now = time.monotonic()
        if not again and now - self._looked < _LOOK_AGAIN:
            return
        self._looked = now
        known: list[set[bytes]] = [set() for _ in self.known]
        held: Counter[str] = Counter()
        for block in stored_blocks(self.root):
            held[block.tenant] += block.nbytes
            if block.path.parent.parent != self.folder:
                continue
            name, _, group = block.path.name.partition("-")
            with suppress(ValueError, IndexError):
                known[int(group)].add(bytes.fromhex(name))
        self.known, self._held, self.nbytes = known, held, held.total()

    def make_room(self) -> None:
        """Remove blocks until at most `_KEPT` of the limit, and of each quota, is left."""
        blocks = stored_blocks(self.root)
        most = None if self.quota is None else int(self.quota * _KEPT)
        gone = room_for(blocks, int(self.limit * _KEPT), most)
        for block in gone:
            with suppress(OSError):
                block.path.unlink()
        self.look(again=True)

    def forget(self) -> None:
        """Remove all blocks of this engine."""
        for block in stored_blocks(self.root):
            if block.path.parent.parent == self.folder:
                with suppress(OSError):
                    block.path.unlink()
        self.look(again=True)

    def _buffer(self, size: int) -> memoryview:
        """Return this thread's buffer; its earlier content is lost."""
        kept: bytearray = getattr(self._mine, "buffer", bytearray())
        if len(kept) < size:
            kept = self._mine.buffer = bytearray(size)
        return memoryview(kept)[:size]

    def _path(self, key: bytes, group: int, tenant: str) -> Path:
        return self.folder / tenant / f"{key.hex()}-{group}"

    def _refused(self, refused: OSError) -> None:
        self._refused_until = time.monotonic() + _TRY_AGAIN
        if not self._said:
            self._said = True
            why = "is full" if refused.errno == errno.ENOSPC else f"refuses: {refused.strerror}"
            log.warning("the disk of %s %s; what is computed is not kept", self.root, why)


def stored_blocks(root: Path) -> list[StoredBlock]:
    """List all blocks below the folder `root`, of every engine and tenant; remove temporary files
    of dead writers."""
    found = []
    now = time.time()
    for folder in _folders(root):
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_TEMPORARY):
                        if now - state.st_mtime > 3600:
                            os.unlink(entry.path)
                        continue
                    path = Path(entry.path)
                    found.append(StoredBlock(path, folder.name, state.st_size, state.st_mtime))
    return found


def room_for(
    blocks: Sequence[StoredBlock], limit: int, quota: int | None = None
) -> list[StoredBlock]:
    """Choose the blocks to remove so that at most `limit` bytes are left.

    First the oldest blocks of each tenant that holds more than `quota`. Then the oldest of all that
    were not used for a day. Then the oldest of the tenant that holds most, until it no longer does.
    """
    mine: defaultdict[str, list[StoredBlock]] = defaultdict(list)
    for block in sorted(blocks, key=lambda block: -block.used):
        mine[block.tenant].append(block)
    sizes = {tenant: sum(block.nbytes for block in held) for tenant, held in mine.items()}
    gone: list[StoredBlock] = []
    for tenant, held in mine.items():
        while quota is not None and sizes[tenant] > quota:
            gone.append(held.pop())
            sizes[tenant] -= gone[-1].nbytes
    total = sum(sizes.values())
    forgotten = time.time() - _DAY
    while total > limit:
        oldest = min((held[-1].used, tenant) for tenant, held in mine.items() if held)
        largest = max(sizes, key=lambda tenant: sizes[tenant])
        if oldest[0] < forgotten:
            largest = oldest[1]
        block = mine[largest].pop()
        sizes[largest] -= block.nbytes
        total -= block.nbytes
        gone.append(block)
    return gone


def is_block(name: str, data: memoryview) -> bool:
    """Tell whether `data`, a whole file, is the block that `name` promises, as far as can be
    checked without its key. `name`: the last three parts of the path. False for a name that no tier
    makes."""
    if not BLOCK_NAME.fullmatch(name):
        return False
    engine, _, file = name.split("/")
    key, _, group = file.partition("-")
    return intact(engine, bytes.fromhex(key), int(group), data)


def put(root: Path, name: str, data: bytes) -> None:
    """Write a whole file and give it its name below `root`. Raises `OSError`."""
    _put(root / name, [memoryview(data)])


def _put(path: Path, parts: Sequence[Bytes], age: int | None = None) -> None:
    fresh = path.with_name(f"{path.name}.{os.getpid()}{_TEMPORARY}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        file = os.open(fresh, _WRITING, 0o600)
        try:
            _write_all(file, parts)
        finally:
            os.close(file)
        if age is not None:
            _touch(fresh, age)
        os.replace(fresh, path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()
        raise


def _folders(root: Path) -> list[Path]:
    """List the tenants' folders: two levels below the root."""
    found = []
    with suppress(OSError):
        for engine in root.iterdir():
            with suppress(OSError):
                found += [tenant for tenant in engine.iterdir() if tenant.is_dir()]
    return found


def _touch(path: Path, age: int) -> None:
    """Set the time of use: now, to the minute, less `age` microseconds.

    The first block of a prefix is the youngest; a block to be kept for an hour gets a time one hour
    ahead.
    """
    used = int(time.time()) // 60 * 60 * 10**9 - age * 1000
    os.utime(path, ns=(used, used))


def _write_all(file: int, parts: Sequence[Bytes]) -> None:
    for begin in range(0, len(parts), _MOST_PARTS):
        some = parts[begin : begin + _MOST_PARTS]
        if os.writev(file, some) != sum(memoryview(part).nbytes for part in some):
            raise OSError(errno.ENOSPC, "a write was cut off")
