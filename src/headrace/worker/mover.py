"""Threads that move blocks between a pool in host memory and a tier below it.

One thread writes, at the lowest priority. Two read, between steps (`gaps`), and announce the next
blocks to the system, so that the disk works while they wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..base.tiers import KeyedBlock, Movement, OrderEnd
from ..kernels.operators import KvCache
from ..obs.threads import THREADS
from .borrowing import Borrowed
from .disk import DiskTier
from .gaps import Gaps
from .places import Places, places_of
from .remote import RemoteTier, open_store
from .seal import BlockForm, Plain, Sealed, TenantKeys
from .stack import LENT, Bytes, Stack, Tier

log = logging.getLogger("headrace.cache")

READERS = 2
CHUNK = 8
"""Blocks that a thread reads before another may take the next ones."""
AHEAD = 16
"""Number of blocks announced to the system before they are read."""
PREPARED = 32
"""Blocks whose pages are allocated at once: other threads that need pages wait for that long."""
NICE = 19
LOOK = 10.0
"""Seconds without a write after which the tier looks for files of other processes."""
PATIENCE = 5.0
"""Seconds in which an engine that ends still writes waiting blocks."""


@dataclass(slots=True)
class _Moving:
    ticket: int
    kind: Movement
    pieces: Sequence[KeyedBlock]
    begun: float = 0.0
    left: int = 0
    """Chunks under way."""
    good: list[bool] = field(default_factory=list)
    told: int = 0
    """Number of pieces that were announced to the tier."""
    lent: bool = False
    """Blocks come from a prefill server."""


class _Fresh(NamedTuple):
    """Blocks whose pages may have no memory yet."""

    places: Places
    blocks: range


class Mover:
    """Block store (`base.tiers.BlockStore`) over a stack of tiers."""

    def __init__(
        self,
        tier: Stack,
        cache: Callable[[], KvCache],
        wake: Callable[[], None],
        gaps: Gaps,
        borrowed: Borrowed | None = None,
    ) -> None:
        """Start the threads. `cache`: the pool as it lies now; `wake`: called in any thread when a
        read has ended; `gaps`: those of the worker's steps; `borrowed`: the tier of borrowed
        blocks."""
        self._tier, self._cache, self._wake, self._gaps = tier, cache, wake, gaps
        self._borrowed = borrowed
        if borrowed is not None:
            borrowed.on_end = self._computed
        self._pool: KvCache | None = None
        self._places: list[Places] = []
        self._ended: deque[OrderEnd] = deque()
        self._reads: queue.SimpleQueue[tuple[_Moving, range] | _Fresh | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_Moving | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open = 1
        """Orders under way, and the first look at the tier."""
        self._looked = False
        """Flag: the writer has looked at the tier."""
        self._threads = [
            THREADS.keep("blocks", work) for work in (self._write_on, *[self._read_on] * READERS)
        ]

    # The engine's thread

    def known(self, group: int) -> Container[bytes]:
        return self._tier.exists(group)

    def place(self, group: int, key: bytes) -> int | None:
        return self._tier.place(group, key)

    @property
    def nearest(self) -> int:
        return self._tier.nearest

    @property
    def keeps(self) -> bool:
        return self._tier.keeps

    @property
    def asks(self) -> bool:
        return self._tier.answers

    def kept_bytes(self) -> int:
        return self._tier.nbytes

    def read(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self._begin()
        self._gaps.order_begins()
        count, lent = len(pieces), self._tier.place(pieces[0].group, pieces[0].key) == LENT
        step = -(-count // READERS) if lent else CHUNK  # Each reader has a line of its own.
        chunks = [range(at, min(at + step, count)) for at in range(0, count, step)]
        job = _Moving(ticket, "read", pieces, left=len(chunks), good=[False] * count, lent=lent)
        for chunk in chunks:
            self._reads.put((job, chunk))

    def seek(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self._begin()
        job = _Moving(ticket, "seek", pieces, left=1, good=[False] * len(pieces))
        self._reads.put((job, range(0)))

    def write(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self._begin()
        self._writes.put(_Moving(ticket, "write", pieces))

    def compare(self, ticket: int, pieces: Sequence[KeyedBlock]) -> None:
        self._begin()
        self._writes.put(_Moving(ticket, "compare", pieces))

    def prepare(self, group: int, blocks: range) -> None:
        self._look()
        for at in range(blocks.start, blocks.stop, PREPARED):
            some = range(at, min(at + PREPARED, blocks.stop))
            # By a reader: the thread with the lowest priority may be suspended while it holds the
            # lock of the process's memory, and all others would wait for it.
            self._reads.put(_Fresh(self._places[group], some))

    def ended(self) -> list[OrderEnd]:
        if not self._ended:
            return []
        found = []
        while self._ended:
            found.append(self._ended.popleft())
        return found

    def forget(self) -> None:
        self._tier.forget()

    def settle(self) -> None:
        """Wait until all orders have ended."""
        with self._idle:
            self._idle.wait_for(lambda: not self._open, PATIENCE)

    def close(self) -> None:
        """Write waiting blocks, for `PATIENCE` seconds, and end the threads."""
        if self._borrowed is not None:
            self._borrowed.close()
        self._writes.put(None)
        for _ in range(READERS):
            self._reads.put(None)
        until = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _begin(self) -> None:
        """Count one more order. The pool's arrays change with `allocate`; `settle` is called before
        it."""
        with self._idle:
            self._open += 1
        self._look()

    def _look(self) -> None:
        cache = self._cache()
        if cache is not self._pool:
            self._pool, self._places = cache, places_of(cache)

    # The others

    def _read_on(self) -> None:
        while (given := self._reads.get()) is not None:
            if isinstance(given, _Fresh):
                with THREADS.skipping("blocks"):
                    self._gaps.wait()
                    given.places.populate(given.blocks, writes=True)
                continue
            job, chunk = given
            with THREADS.skipping("blocks"):
                self._read_some(job, chunk)
            # An order ends in any case: the engine waits for it.
            with self._idle:
                job.left -= 1
                last = not job.left
            if last:
                self._end(job)

    def _read_some(self, job: _Moving, chunk: range) -> None:
        if job.kind == "seek":
            asked = [(one.key, one.group, one.tenant) for one in job.pieces]
            job.good = self._tier.seek(asked)
        if job.lent:
            assert self._borrowed is not None
            self._gaps.wait()
            job.begun = job.begun or time.perf_counter()
            some = slice(chunk.start, chunk.stop)
            job.good[some] = self._borrowed.bring(job.pieces[some], self._places, self._gaps.wait)
            return
        for at in chunk:
            self._gaps.wait()
            # Without the time that it waited for other orders: the result is a rate.
            job.begun = job.begun or time.perf_counter()
            self._read_one(job, at)

    def _read_one(self, job: _Moving, at: int) -> None:
        """Read one block, and announce the next ones to the tier, each once."""
        told, job.told = job.told, max(job.told, at + AHEAD)
        for piece in job.pieces[told : at + AHEAD]:
            self._tier.expect(piece.key, piece.group, piece.tenant)
        job.good[at] = self._guarded(self._brought, job.pieces[at])

    def _write_on(self) -> None:
        _stand_back()
        if not self._looked:
            self._looked = True
            with THREADS.skipping("blocks"):
                self._tier.look(again=True)
            self._close_one()
        while True:
            try:
                job = self._writes.get(timeout=LOOK)
            except queue.Empty:
                with THREADS.skipping("blocks"):
                    self._tier.look()
                continue
            if job is None:
                return
            job.begun = time.perf_counter()
            do = self._written if job.kind == "write" else self._compared
            job.good = [self._guarded(do, piece) for piece in job.pieces]
            self._end(job)

    def _kept(self, piece: KeyedBlock) -> Bytes | None:
        size = self._places[piece.group].nbytes
        return self._tier.read(piece.key, piece.group, piece.tenant, size, piece.age)

    def _brought(self, piece: KeyedBlock) -> bool:
        kept = self._kept(piece)
        if kept is None:
            return False
        self._places[piece.group].fill([piece.block], kept)
        return True

    def _written(self, piece: KeyedBlock) -> bool:
        parts = self._places[piece.group].parts(piece.block)
        return self._tier.write(piece.key, piece.group, piece.tenant, parts, piece.age)

    def _compared(self, piece: KeyedBlock) -> bool:
        """Compare the stored block with the pool's. A block that is gone counts as equal."""
        kept = self._kept(piece)
        equal = kept is None or kept == b"".join(self._places[piece.group].parts(piece.block))
        if not equal:
            self._tier.drop(piece.key, piece.group, piece.tenant)
        return equal

    def _guarded(self, do: Callable[[KeyedBlock], bool], piece: KeyedBlock) -> bool:
        """Move one block; return False if that fails with any exception."""
        with THREADS.skipping("blocks"):
            return do(piece)
        return False

    def _end(self, job: _Moving) -> None:
        seconds = time.perf_counter() - job.begun
        sizes = [self._places[one.group].nbytes for one in job.pieces]
        nbytes = sum(size for size, good in zip(sizes, job.good, strict=True) if good)
        if job.kind == "seek":
            nbytes = 0
        if job.kind == "read":
            self._gaps.order_ended()
        self._ended.append(OrderEnd(job.ticket, job.kind, tuple(job.good), nbytes, seconds))
        self._close_one()
        self._wake()

    def _computed(self, ticket: int, good: bool) -> None:
        """Report that a prefill server lends a prompt's blocks, or does not."""
        self._ended.append(OrderEnd(ticket, "prefill", (good,), 0, 0.0))
        self._wake()

    def _close_one(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()


def below(
    cache: Callable[[], KvCache],
    wake: Callable[[], None],
    gaps: Gaps,
    root: Path,
    engine: str,
    limit: int,
    quota: int | None = None,
    remote: str | None = None,
    keys: Path | None = None,
    borrowed: Borrowed | None = None,
) -> Mover:
    """Make a mover between a pool, the disk, the store of the URL `remote`, and borrowed blocks.

    The other arguments are those of `Mover` and `DiskTier`. With a limit of 0 there is no disk.
    `keys`: the folder of the keys that seal blocks.
    """
    form: BlockForm = Plain(engine) if keys is None else Sealed(engine, TenantKeys(keys))
    groups = max(cache().groups) + 1
    tiers: list[Tier] = [DiskTier(root, form, groups, limit, quota)] if limit else []
    if remote is not None:
        tiers.append(RemoteTier(open_store(remote), form, groups))
    lent = [] if borrowed is None else [borrowed]
    return Mover(Stack(tiers, lent), cache, wake, gaps, borrowed)


def _stand_back() -> None:
    """Give this thread the lowest priority."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
