"""Both sides of a prefill/decode split as an engine opens them; the prefill server's in its loop.

A prompt that a decode server hands over becomes a request like any other. It computes one token,
which is not used. Its blocks in the prefix index are lent from then on (`kv.leases`), and the
socket's thread sends them (`worker.lending`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from ...base.config import EngineOptions
from ...base.errors import HeadraceError
from ...base.identity import Identity
from ...base.request import Request, SequenceDelta
from ...base.sampling import SamplingParams
from ...base.spec import RequestSpec
from ...base.split import Handed, Role, SplitStats
from ...base.step import PoolShape
from ...kv import KvManager, PrefixChain
from ...kv.leases import Leases, Name
from ...worker.borrowing import Borrowed
from ...worker.lending import LendingSocket
from ...worker.split_wire import Terms
from .context import Paged
from .core import EngineCore
from .executor import Executor, InlineExecutor

MINE = "headrace-split-"
"""Prefix of the ids of such requests."""


class Lender:
    """The prefill server's side. Belongs to the engine's thread."""

    def __init__(
        self,
        socket: LendingSocket,
        leases: Leases,
        kv: KvManager,
        computing: Callable[[int, int], float],
        adapter_named: Callable[[str], str | None],
    ) -> None:
        """`adapter_named`: an adapter's content → its name here."""
        self._socket, self._leases, self._kv = socket, leases, kv
        self.stats = SplitStats()
        self._computing = computing
        self._adapter_named = adapter_named
        self._numbers = itertools.count()
        self._in_work: dict[str, tuple[Name, PrefixChain, Handed]] = {}
        self._ids: dict[Name, str] = {}

    def turn(self, core: EngineCore, *, asleep: bool = False) -> bool:
        """Take the messages that came, and end prompts that are no longer wanted. Return whether
        counts have changed."""
        before = len(self._leases), self.stats.refused
        for name in self._leases.expire():
            self._end(core, name)
        for name, handed in self._socket.asked():
            if handed is None:
                self._leases.release(name)
                self._end(core, name)
            elif why := "this engine sleeps" if asleep else self._begin(core, name, handed):
                self._decline(name, why)
        self._count()
        tokens = sum(len(handed.tokens) for _, _, handed in self._in_work.values())
        self._socket.ahead = self._computing(0, tokens) if tokens else 0.0
        changed = before != (len(self._leases), self.stats.refused)
        if changed and not core.has_work:
            core.stats = core.scheduler.stats()
        return changed

    def _count(self) -> None:
        stats, leases = self.stats, self._leases
        stats.leases, stats.lent_blocks = len(leases), sum(leases.held.values())
        stats.expired, stats.lent_bytes = leases.expired, self._socket.lines.sent_bytes

    def take(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        """Return the deltas of other requests; lend the blocks of our own that are computed."""
        if not self._in_work:
            return deltas
        others = []
        for delta in deltas:
            if delta.request_id not in self._in_work:
                others.append(delta)
            elif delta.finish is not None:
                self._computed(delta)
        self._count()
        return others

    def _begin(self, core: EngineCore, name: Name, handed: Handed) -> str:
        """Have it computed; return why not, or ""."""
        if len(handed.tokens) >= core.max_context:
            return f"prompts here have fewer than {core.max_context} tokens"
        adapter = None
        if handed.adapter is not None:
            adapter = self._adapter_named(handed.adapter)
            if adapter is None:
                return "the adapter is not loaded here"
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request = Request(
            f"{MINE}{next(self._numbers)}",
            handed.tokens,
            RequestSpec(sampling, seed=0, adapter=adapter),
            cache_salt=handed.salt,
            arrival=time.monotonic(),
        )
        chain = self._kv.chain(request, handed.tokens)
        if chain is None or chain.extend(handed.blocks)[handed.blocks - 1] != handed.key:
            return "this prompt has another name here"
        if not self._leases.offer(name):
            return "a prompt of this number is open"
        try:
            core.add(request)
        except HeadraceError as error:
            self._leases.release(name)
            return error.message
        self._in_work[request.id] = name, chain, handed
        self._ids[name] = request.id
        return ""

    def _computed(self, delta: SequenceDelta) -> None:
        name, chain, handed = self._in_work.pop(delta.request_id)
        del self._ids[name]
        if name not in self._leases:
            # Released or expired: its borrower knows, or is gone. Or the cache was emptied.
            self._socket.declined(name, "it is not wanted, or means something else now")
            return
        if delta.finish == "error":
            self._leases.release(name)
            self._decline(name, delta.error or "the step failed")
            return
        runs = self._leases.lend(name, chain, handed.first, handed.blocks)
        if runs is None:
            self._decline(name, "there is no room to hold its blocks")
            return
        self.stats.computed += 1
        self._socket.lent(name, runs)

    def _end(self, core: EngineCore, name: Name) -> None:
        """Compute no more of it."""
        if (request_id := self._ids.get(name)) is not None:
            core.abort(request_id)

    def _decline(self, name: Name, why: str) -> None:
        self.stats.refused += 1
        self._socket.declined(name, why)

    def close(self) -> None:
        self._socket.close()


def borrowed(
    options: EngineOptions, kv: KvManager, pool: PoolShape, identity: Identity
) -> Borrowed | None:
    """Open what prefill servers lend this engine; None if it asks none."""
    role = Role.parse(options.role)
    if role.kind != "decode":
        return None
    return Borrowed(role.addresses, role.secret(), _terms(kv, identity), pool)


def lender(
    options: EngineOptions,
    kv: KvManager,
    identity: Identity,
    executor: Executor,
    computing: Callable[[int, int], float],
    adapter_named: Callable[[str], str | None],
    vocabulary: int,
) -> Lender | None:
    """Open the lender of this engine's blocks; None if it lends none. Raises `OptionError` if the
    address cannot be bound."""
    role = Role.parse(options.role)
    if role.kind != "prefill" or not isinstance(executor, InlineExecutor):
        return None
    worker = executor.worker
    assert isinstance(worker, Paged), "such a worker has no blocks to lend"
    leases = kv.leases = Leases(kv)
    socket = LendingSocket(
        role.addresses[0],
        role.secret(),
        _terms(kv, identity),
        lambda: worker.cache,
        worker.pool_memory,
        executor.wake.ring,
        leases,
        vocabulary,
    )
    return Lender(socket, leases, kv, computing, adapter_named)


def _terms(kv: KvManager, identity: Identity) -> Terms:
    held = [(group.name, group.layers, group.window, group.arrays) for group in kv.groups]
    return Terms(kv.root, identity, kv.block_size, repr(held))
