"""The context cache of an engine: the tiers below its KV pool, from option to resource.

On a CPU the pool lies in the host's memory and the system's page cache is the tier between it and
the disk, so that there are: pool, disk, and a store that machines share where one is named.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from urllib.parse import urlsplit

from ..base.config import Decision, EngineOptions, parse_size
from ..base.errors import OptionError
from ..base.groups import kept_bytes
from ..base.modelfiles import ModelFiles
from ..base.request import Request
from ..base.step import PoolShape
from ..kv import KvManager, Tiers
from ..kv.tiers import Computing
from ..loader.cache import root
from ..sched.work import Work
from .executor import Executor, InlineExecutor

if TYPE_CHECKING:
    from ..kernels.operators import KvCache
    from ..worker.mover import Mover

SERVED = 8 << 30
"""Bytes that `headrace serve` takes of a disk, where that is at most a tenth of what is free."""


def served_size(options: EngineOptions) -> str:
    """What "auto" is for a server: a size, as the option takes it."""
    folder = root(options.cache_dir)
    while not folder.exists():
        folder = folder.parent
    return str(min(SERVED, shutil.disk_usage(folder).free // 10))


def context_cache(options: EngineOptions, files: ModelFiles, device: str) -> Decision:
    """How many bytes of disk keep KV; "0" for none. Raises `OptionError` for what is no size."""
    wish, obstacle = options.context_cache, ""
    size = 0 if wish == "auto" else parse_size(wish, "context_cache")
    if files.arch.task != "tokens":
        obstacle = "an encoder keeps nothing between two steps"
    elif device != "cpu":
        obstacle = f"a pool on {device} has no tier below it yet"
    elif not options.prefix_cache:
        obstacle = "prefix_cache is off"
    elif options.executor != "inline":
        obstacle = "the worker is in a process of its own"
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
    """Which store below the disk; None where none was named. Raises `OptionError` where one was
    that this engine cannot use."""
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
"""Why there is no disk, where there may be another tier all the same."""


class ContextCache:
    """A `sched.Resource`: work is admitted when what is worth loading for it has come."""

    def __init__(self, tiers: Tiers, mover: Mover) -> None:
        self.tiers = tiers
        self._mover = mover

    def verify(self, request: Request) -> None:
        """What is not there is computed."""

    def prepare(self, work: Work) -> bool:
        if work.chain is None or not work.reads:
            return True
        if not self.tiers.ready(work.id, work.chain, work.known):
            return False
        work.loaded = max(work.loaded, self.tiers.loaded(work.id))
        return True

    def free(self, work: Work) -> None:
        self.tiers.left(work.id)

    def settle(self) -> None:
        """Wait until nothing is under way: the pool is about to be another."""
        self._mover.settle()
        self.tiers.turn()

    def close(self) -> None:
        self._mover.close()


@runtime_checkable
class _Paged(Protocol):
    """A worker with a pool of its own: none that stands in for one."""

    @property
    def cache(self) -> KvCache: ...


def open_context_cache(
    decided: Decision,
    options: EngineOptions,
    kv: KvManager,
    pool: PoolShape,
    executor: Executor,
    seconds: Computing,
) -> ContextCache | None:
    """The tiers that were decided on; None where there are none."""
    remote = options.context_cache_remote
    if decided.value == "0" and (remote is None or decided.reason not in _BUT_A_DISK):
        return None
    if not isinstance(executor, InlineExecutor):
        return None
    # Local: only a process with a worker pays for this import.
    from ..worker.mover import below

    worker = executor.worker
    if not isinstance(worker, _Paged):
        return None
    mover = below(
        lambda: worker.cache,
        executor.wake.ring,
        root(options.cache_dir),
        kv.root.hex()[:32],
        int(decided.value),
        remote,
    )
    sizes = [
        pool.block_size * len(group.layers) * kept_bytes(group.arrays) for group in pool.groups
    ]
    tiers = kv.tiers = Tiers(kv, mover, sizes, seconds)
    return ContextCache(tiers, mover)
