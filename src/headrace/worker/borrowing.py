"""Blocks borrowed from prefill servers, as a tier below the pool, and the requests for them.

One thread talks to all servers; readers fetch the blocks of an order on lines of their own
(`fetching`). A block that comes late or with a wrong digest is computed here, like one that a disk
lost. Every awaited prompt and every borrowed block has a time limit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..base.extras import needed
from ..base.foreign import Undecodable
from ..base.split import Handed, SplitStats
from ..base.step import PoolShape
from ..base.tiers import KeyedBlock
from ..dist.wake import Wake
from ..obs.threads import THREADS
from . import split_wire as wire
from .block_line import CIPHERS, OtherBytes
from .fetching import Fetching, Wanted, open_line
from .places import Places
from .stack import LENT

log = logging.getLogger("headrace.split")

LATE = 4.0
"""Multiple of its expected time after which a prompt is given up."""
GRACE_SECONDS = 2.0
"""Seconds added to that limit."""
HELD_SECONDS = 30.0
"""Seconds after which borrowed blocks that were not read are released."""
AGAIN_SECONDS = 30.0
"""Seconds until a server with other terms is asked again."""


@dataclass(slots=True, eq=False)
class _Server:
    """One prefill server as seen from here."""

    address: str
    socket: Any
    answers: bool = False
    heard: float = 0.0
    hail_at: float = 0.0
    """Time of the next `Hail`, unless the server answers."""
    ahead: float = 0.0
    """Seconds of prompts in work there, as it last reported."""
    loans: dict[int, _Loan] = field(default_factory=dict)
    welcome: wire.Welcome | None = None
    """Its welcome, while it answers."""
    lines: list[Fetching] = field(default_factory=list)
    """Open lines that no reader uses."""
    pool: list[Places] | None = None
    """The server's own pool by group, if a line found that it can be mapped."""

    def hang_up(self) -> None:
        """Close its idle lines; a line in use is closed after its use."""
        self.welcome = self.pool = None
        for line in self.lines:
            line.close()
        self.lines.clear()

    @property
    def load(self) -> float:
        """Return seconds of prompts there: the reported number, or the sum asked from here if
        larger."""
        return max(self.ahead, sum(one.seconds for one in self.loans.values() if not one.lent))


@dataclass(slots=True, eq=False)
class _Loan:
    """One prompt, from the request to the release."""

    ticket: int
    server: _Server
    keys: list[bytes]
    seconds: float
    until: float
    """Time when it is given up."""
    lent: bool = False
    runs: list[tuple[int, list[int]]] = field(default_factory=list)
    """Lent blocks by group, as in `Lent`."""


class Borrowed:
    """Borrowed blocks, as a `stack.Known` and a `base.split.PrefillServers`."""

    rank = LENT

    def __init__(
        self,
        addresses: Sequence[str],
        secret: bytes | None,
        terms: wire.Terms,
        pool: PoolShape,
    ) -> None:
        """Connect to the servers; `pool` is the one here. Raises `PackageAbsent`."""
        self._zmq = wire.zeromq()
        self._terms, self._shape, self.stats = terms, pool, SplitStats()
        if secret is not None:
            needed(*CIPHERS)
        self._context = self._zmq.Context()
        self._servers = [
            _Server(address, wire.asking(self._context, address, secret)) for address in addresses
        ]
        self.on_end: Callable[[int, bool], None] = lambda ticket, good: None
        """Called at each order's end, in any thread."""
        self._loans: dict[int, _Loan] = {}
        self._there: list[dict[bytes, tuple[_Loan, int]]] = [{} for _ in pool.groups]
        """By group and key: the loan that has the block, and its place in the loan's prompt."""
        self._lock = threading.Lock()
        """Lock of all of the above."""
        self._unsaid: deque[tuple[_Server, Any]] = deque()
        self._heard = Wake()
        self._looked = time.monotonic()
        """Time when silences were last looked at."""
        self._open = True
        self._thread = THREADS.keep("borrowing", self._run)

    # The engine's thread

    def ahead(self) -> float | None:
        with self._lock:
            return min((one.load for one in self._servers if one.answers), default=None)

    def ask(self, ticket: int, handed: Handed, keys: list[bytes], seconds: float) -> None:
        with self._lock:
            able = [one for one in self._servers if one.answers]
            if able:
                server = min(able, key=lambda one: (one.load, len(one.loans)))
                until = time.monotonic() + GRACE_SECONDS + LATE * (server.load + seconds)
                loan = _Loan(ticket, server, keys, seconds, until)
                self._loans[ticket] = server.loans[ticket] = loan
        if able:
            self._say(server, wire.Compute(ticket, handed))
        else:
            self.stats.failed += 1
            self.on_end(ticket, False)

    def release(self, ticket: int) -> None:
        with self._lock:
            if (loan := self._loans.get(ticket)) is not None:
                self.stats.left += not loan.lent
                self._end(loan)

    def close(self) -> None:
        with self._lock:
            for loan in list(self._loans.values()):
                self._end(loan)
            for server in self._servers:
                server.hang_up()
        self._open = False
        self._heard.ring()
        self._thread.join(5.0)
        self._heard.close()

    # Readers

    def exists(self, group: int) -> Container[bytes]:
        return self._there[group]

    def bring(
        self, pieces: Sequence[KeyedBlock], places: Sequence[Places], ready: Callable[[], None]
    ) -> list[bool]:
        """Bring blocks to their destinations in the pool that lies at `places`; return which came.
        `ready` returns when some may be written."""
        with self._lock:
            found = [self._there[one.group].get(one.key) for one in pieces]
        good: list[bool] = []
        both = zip(pieces, found, strict=True)
        for (loan, group), run in groupby(both, lambda one: (one[1] and one[1][0], one[0].group)):
            wanted = []
            for piece, lent in run:
                first, blocks = (0, []) if lent is None else lent[0].runs[group]
                at = 0 if lent is None else lent[1]
                there = blocks[at - first] if 0 <= at - first < len(blocks) else -1
                wanted.append(Wanted(at, piece.key, piece.block, there))
            # In order of address: adjacent blocks move as one. A used pool gives out the blocks
            # that were freed last first.
            blocks = [one.block for one in wanted]
            wanted.sort(key=lambda one: one.block)
            came = 0 if loan is None else self._brought(loan, group, wanted, places[group], ready)
            here = {one.block for one in wanted[:came]}
            good += [block in here for block in blocks]
        return good

    def _brought(
        self,
        loan: _Loan,
        group: int,
        wanted: Sequence[Wanted],
        into: Places,
        ready: Callable[[], None],
    ) -> int:
        server, came = loan.server, 0
        with self._lock:
            welcome, line = server.welcome, server.lines.pop() if server.lines else None
            pool = server.pool
        try:
            if welcome is not None:
                line = line or open_line(server.address, welcome, self._shape, pool)
                if line.pool is not None:  # Both readers may have mapped it: one is enough.
                    line.pool = pool or line.pool
                came = line.bring(loan.ticket, group, wanted, into, ready)
        except OtherBytes as wrong:
            log.warning("%s: %s, and is computed here", server.address, wrong)
        except (OSError, Undecodable) as broken:
            log.warning("blocks of %s do not come: %s", server.address, broken)
            with self._lock:
                if server.welcome is welcome:
                    self._lost(server, "sent no blocks")
        with self._lock:
            for one in wanted:
                self._forget(one.key, group, loan)
            if line is not None and came == len(wanted) and server.welcome is welcome:
                server.pool = line.pool
                server.lines.append(line)
            elif line is not None:
                line.close()
        return came

    def drop(self, key: bytes, group: int, tenant: str) -> None:
        with self._lock:
            self._there[group].pop(key, None)

    def forget(self) -> None:
        with self._lock:
            for loan in list(self._loans.values()):
                self._end(loan)

    # With the lock

    def _forget(self, key: bytes, group: int, loan: _Loan) -> None:
        """Forget a block that was read or will not come."""
        found = self._there[group].get(key)
        if found is not None and found[0] is loan:
            del self._there[group][key]

    def _lend(self, loan: _Loan, runs: list[tuple[int, list[int]]]) -> None:
        loan.lent, loan.until, loan.runs = True, time.monotonic() + HELD_SECONDS, runs
        for there, (first, _) in zip(self._there, runs, strict=False):
            for at in range(max(0, first), len(loan.keys)):
                there[loan.keys[at]] = loan, at

    def _end(self, loan: _Loan, *, said: bool = False) -> None:
        """End a loan in any state; `said`: the server ended it."""
        del self._loans[loan.ticket], loan.server.loans[loan.ticket]
        if loan.lent:
            for group in range(len(self._there)):
                for key in loan.keys:
                    self._forget(key, group, loan)
        if not said:
            self._say(loan.server, wire.Release([loan.ticket]))
        if not loan.lent:
            self.on_end(loan.ticket, False)

    def _lost(self, server: _Server, why: str) -> None:
        """Give up a server: nothing more is expected of it."""
        if server.answers:
            log.warning("the prefill server %s %s", server.address, why)
        server.answers, server.hail_at = False, 0.0
        server.hang_up()
        for loan in list(server.loans.values()):
            self.stats.failed += not loan.lent
            self._end(loan)

    @staticmethod
    def _touch(server: _Server, runs: list[tuple[int, list[int]]]) -> None:
        """Have the system map a server's blocks while the engine's thread wakes."""
        for of, (_, blocks) in zip(server.pool or (), runs, strict=False):
            if blocks and 0 <= min(blocks) <= max(blocks) < of.blocks:
                of.populate(blocks, writes=False)

    # Its own thread

    def _say(self, server: _Server, what: Any) -> None:
        self._unsaid.append((server, what))
        self._heard.ring()

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._heard.fileno(), zmq.POLLIN)
        for server in self._servers:
            poller.register(server.socket, zmq.POLLIN)
        renewed = 0.0
        try:
            while self._open or self._unsaid:
                poller.poll(1000 * wire.RENEW_SECONDS)
                self._heard.clear()
                self._speak()
                for server in self._servers:
                    self._hear(server)
                if time.monotonic() - renewed >= wire.RENEW_SECONDS:
                    renewed = time.monotonic()
                    self._renew(renewed)
        except Exception:
            with self._lock:  # Until the next run hails them.
                for server in self._servers:
                    self._lost(server, "is not heard any more")
            raise
        self._context.destroy(linger=100)

    def _speak(self) -> None:
        while self._unsaid:
            with THREADS.skipping("borrowing"):
                self._send(*self._unsaid.popleft())

    def _send(self, server: _Server, what: Any) -> None:
        # If it is not connected or takes nothing, its silence will show that soon.
        with suppress(self._zmq.Again):
            server.socket.send(wire.pack(what), self._zmq.NOBLOCK)

    def _renew(self, now: float) -> None:
        # Whoever slept itself has asked nobody meanwhile.
        slept, self._looked = now - self._looked > wire.SILENT_SECONDS / 2, now
        with self._lock:
            for loan in list(self._loans.values()):
                if now > loan.until:
                    self.stats.failed += not loan.lent
                    self._end(loan)
            for server in self._servers:
                if slept:
                    server.heard = now
                if server.answers and now - server.heard > wire.SILENT_SECONDS:
                    self._lost(server, "says nothing")
                if server.answers:
                    self._send(server, wire.Renew(list(server.loans)))
                elif now >= server.hail_at:
                    self._send(server, wire.Hail(self._terms))
            self.stats.servers = sum(one.answers for one in self._servers)

    def _hear(self, server: _Server) -> None:
        zmq = self._zmq
        while True:
            try:
                frames = server.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with THREADS.skipping("borrowing"):
                message = wire.to_decode(frames[0])
                with self._lock:
                    server.heard = time.monotonic()
                    self._heard_of(server, message)

    def _heard_of(self, server: _Server, message: Any) -> None:
        match message:
            case wire.Welcome():
                if not server.answers:
                    log.info("the prefill server %s answers", server.address)
                    server.answers, server.welcome = True, message
            case wire.Unlike(differences):
                self._lost(server, "has other terms")
                server.hail_at = time.monotonic() + AGAIN_SECONDS
                log.warning(
                    "%s lends nothing to this server: %s", server.address, "; ".join(differences)
                )
            case wire.Stranger():
                self._lost(server, "began anew")
            case wire.Alive(ahead):
                server.ahead = ahead if 0 <= ahead < float("inf") else 0.0
            case wire.Lent(ticket, runs):
                loan = server.loans.get(ticket)
                if loan is not None and not loan.lent:
                    self._lend(loan, runs)
                    self.on_end(ticket, True)
                    self._touch(server, runs)
            case wire.Declined(ticket, why):
                loan = server.loans.get(ticket)
                if loan is not None:
                    log.info("%s does not compute a prompt: %.200s", server.address, why)
                    self.stats.declined += not loan.lent
                    self._end(loan, said=True)
