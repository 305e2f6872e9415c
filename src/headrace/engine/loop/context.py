"""The context cache of an engine: the tiers below its KV pool, from option to resource.

On a CPU the pool lies in the host's memory, and the system's page cache is the tier between it and
the disk. So the tiers are: pool, disk, and a store that machines share if one is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from ...base.config import Decision, EngineOptions, parse_size
from ...base.errors import OptionError
from ...base.groups import block_bytes
from ...base.layout import ONE, Layout
from ...base.modelfiles import ModelFiles
from ...base.request import Request
from ...base.step import PoolShape
from ...kv import KvManager, PrefixChain, Tiers
from ...kv.tiers import Computing
from ...loader.cache import root
from ...sched.work import Work
from .executor import Executor, InlineExecutor

if TYPE_CHECKING:
    from ...kernels.operators import KvCache
    from ...worker.borrowing import Borrowed
    from ...worker.elsewhere import PoolElsewhere
    from ...worker.gaps import Gaps
    from ...worker.kv_tensors import PoolMemory
    from ...worker.mover import Mover

SERVED = 8 << 30
"""Bytes that `headrace serve` takes of a disk, if that is at most a tenth of the free space."""


def served_size(options: EngineOptions) -> str:
    """Return the value of "auto" for a server: a size in the option's form."""
    folder = root(options.cache_dir)
    while not folder.exists():
        folder = folder.parent
    return str(min(SERVED, shutil.disk_usage(folder).free // 10))


def context_cache(options: EngineOptions, files: ModelFiles, device: str) -> Decision:
    """Decide how many bytes of disk keep KV; "0" for none. Raises `OptionError` for an invalid
    size."""
    wish, obstacle = options.context_cache, ""
    size = 0 if wish == "auto" else parse_size(wish, "context_cache")
    parse_size(options.context_cache_quota or "0", "context_cache_quota")
    if files.arch.task != "tokens":
        obstacle = "an encoder keeps nothing between two steps"
    elif device != "cpu":
        obstacle = f"a pool on {device} has no tier below it yet"
    elif not options.prefix_cache:
        obstacle = "prefix_cache is off"
    elif options.executor != "inline" and (options.depth or 1) > 1:
        obstacle = "a worker in a process of its own leaves no time between two steps in flight"
    elif options.executor != "inline" and not hasattr(os, "memfd_create"):
        obstacle = "this system has no memory that a process can share with its worker"
    elif Layout.parse(options.layout) != ONE:
        obstacle = "ranks that share a model have no tier below them yet"
    elif wish == "auto" and options.context_cache_remote:
        obstacle = "only the remote store keeps it, unless a size is given"
    elif wish == "auto":
        obstacle = "nothing is kept on the disk unasked, but by a server"
    elif not size:
        obstacle = "asked for"
    if obstacle:
        return Decision("context_cache", "0", obstacle)
    folder = root(options.cache_dir) / "kv"
    return Decision("context_cache", str(size), f"bytes below {folder}, for blocks of every model")


def remote_store(options: EngineOptions, decided: Decision) -> Decision | None:
    """Decide the store below the disk; None if none was named. Raises `OptionError` if the URL is
    invalid."""
    url = options.context_cache_remote
    if url is None:
        return None
    if "://" not in url:
        raise OptionError(f"{url!r} is no URL", param="context_cache_remote")
    unusable = decided.value == "0" and decided.reason not in _BUT_A_DISK
    value = "none" if unusable else urlsplit(url)._replace(netloc=urlsplit(url).hostname or "")
    shown = value if isinstance(value, str) else value.geturl()
    return Decision("context_cache.remote", shown, decided.reason if unusable else "asked for")


_BUT_A_DISK = ("asked for", "only the remote store keeps it, unless a size is given")
"""Reasons for no disk that still allow another tier."""


class PrefixTrace:
    """A file with a line for each request: its time, and the names of its prompt's blocks."""

    MOST = 256 << 20

    def __init__(self, file: Path, head: dict[str, float]) -> None:
        """Raises `OptionError` if it cannot be written."""
        try:
            file.unlink(missing_ok=True)
            self._file = os.fdopen(
                os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", buffering=1 << 16
            )
        except OSError as refused:
            raise OptionError(
                f"{file} cannot be written: {refused.strerror}", param="context_cache_trace"
            ) from None
        self._written = 0
        self._last = -1
        self._write(head)

    def note(self, work: int, chain: PrefixChain, tokens: int) -> None:
        """Write one line for a work, even if it asks repeatedly."""
        if work == self._last or self._written > self.MOST:
            return
        self._last = work
        keys = [key[:6].hex() for key in chain.extend(tokens // chain.block_size)]
        self._write({"t": round(time.time(), 3), "tenant": chain.tenant, "keys": keys})

    def _write(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # A full disk ends the trace, not the engine.
            self._written += self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class ContextCache:
    """A `sched.Resource`: work is admitted when the blocks worth loading for it have come."""

    def __init__(self, tiers: Tiers, mover: Mover, trace: PrefixTrace | None = None) -> None:
        self.tiers = tiers
        self._mover = mover
        self._trace = trace

    def verify(self, request: Request) -> None:
        """Accept: missing blocks are computed."""

    def prepare(self, work: Work) -> bool:
        if work.chain is None or not work.reads:
            return True
        if not self.tiers.ready(work.id, work.chain, work.known):
            return False
        if self._trace is not None and not work.preemptions:
            self._trace.note(work.id, work.chain, work.prompt_length)
        work.loaded = max(work.loaded, self.tiers.loaded(work.id))
        return True

    def free(self, work: Work) -> None:
        self.tiers.left(work.id)

    def settle(self) -> None:
        """Wait until nothing is under way: the pool is about to be replaced."""
        self._mover.settle()
        self.tiers.turn()

    def close(self) -> None:
        self._mover.close()
        if self._trace is not None:
            self._trace.close()


def has_tiers(decided: Decision, options: EngineOptions) -> bool:
    """Return whether there is a tier below the pool, as far as options say."""
    remote = options.context_cache_remote is not None and decided.reason in _BUT_A_DISK
    return decided.value != "0" or remote


@runtime_checkable
class _Sharing(Protocol):
    """An executor of a worker elsewhere, whose pool lies in a file of memory."""

    pool: PoolElsewhere | None
    pool_file: int

    def ring(self) -> None: ...


@runtime_checkable
class Paged(Protocol):
    """A worker with a pool of its own, not a substitute for a worker."""

    @property
    def cache(self) -> KvCache: ...
    @property
    def gaps(self) -> Gaps: ...
    @property
    def pool_memory(self) -> PoolMemory: ...


def open_context_cache(
    decided: Decision,
    options: EngineOptions,
    kv: KvManager,
    pool: PoolShape,
    executor: Executor,
    seconds: Computing,
    borrowed: Borrowed | None = None,
) -> ContextCache | None:
    """Open the tiers that were decided on, and prefill servers' loans; None if there are
    neither."""
    if not has_tiers(decided, options) and borrowed is None:
        return None
    # Local: only a process with a worker pays for this import.
    from ...worker import elsewhere, mover

    paged: Paged
    if isinstance(executor, InlineExecutor) and isinstance(executor.worker, Paged):
        paged, ring = executor.worker, executor.wake.ring
    elif isinstance(executor, _Sharing):
        paged = executor.pool = elsewhere.PoolElsewhere(executor.pool_file, pool)
        ring = executor.ring
    else:
        return None
    quota, keys = options.context_cache_quota, options.context_cache_keys
    moves = mover.below(
        lambda: paged.cache,
        ring,
        paged.gaps,
        root(options.cache_dir),
        kv.root.hex()[:32],
        int(decided.value),
        parse_size(quota or "0", "context_cache_quota") or None,
        options.context_cache_remote,
        None if keys is None else Path(keys),
        borrowed,
    )
    sizes = [block_bytes(group, pool.block_size) for group in pool.groups]
    tiers = kv.tiers = Tiers(kv, moves, sizes, seconds)
    trace = None
    if options.context_cache_trace is not None:
        per_token = seconds(0, 1024) / 1024
        head = {
            "block_tokens": pool.block_size,
            "block_bytes": sum(sizes),
            "prefill_seconds": per_token if per_token < float("inf") else 0.0,
            "load_rate": tiers.rates[0],
        }
        trace = PrefixTrace(Path(options.context_cache_trace), head)
    return ContextCache(tiers, moves, trace)
