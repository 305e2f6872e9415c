"""Blocks that prefill servers lend, as a tier below the pool, and the asking for them.

One thread talks to all servers. Readers say what they will read (`expect`), so that some blocks are
under way while one is taken; a block that does not come in time, or with another digest, is
computed here, as one that a disk lost. Nothing here is held without an end: neither a prompt that
is awaited, nor what was lent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..base.split import Handed, SplitStats
from ..dist.wake import Wake
from . import split_wire as wire
from .seal import HEAD_BYTES, block_head
from .stack import Bytes

log = logging.getLogger("headrace.split")

FETCH_SECONDS = 2.0
"""Bound of the wait for one block."""
LATE = 4.0
"""A prompt is given up when it took so many times as long as it should have."""
GRACE_SECONDS = 2.0
"""What comes on top of that."""
HELD_SECONDS = 30.0
"""After which something lent that nobody reads is released."""
AGAIN_SECONDS = 30.0
"""After which a server of other terms is asked again."""

Place = tuple[int, int]
"""(group, place in the prompt)"""


@dataclass(slots=True, eq=False)
class _Server:
    """One prefill server as it is seen from here."""

    address: str
    socket: Any
    answers: bool = False
    heard: float = 0.0
    hail_at: float = 0.0
    """When it is to be told who asks, unless it answers."""
    ahead: float = 0.0
    """Seconds of prompts in work there, as it said."""
    loans: dict[int, _Loan] = field(default_factory=dict)

    @property
    def load(self) -> float:
        """Seconds of prompts there: what it said, and at least what was asked from here."""
        return max(self.ahead, sum(one.seconds for one in self.loans.values() if not one.lent))


@dataclass(slots=True, eq=False)
class _Loan:
    """One prompt, from the question to the release."""

    ticket: int
    server: _Server
    keys: list[bytes]
    seconds: float
    until: float
    """When it is given up."""
    lent: bool = False
    ended: bool = False
    asked: set[Place] = field(default_factory=set)
    came: dict[Place, Any] = field(default_factory=dict)
    """Blocks that are here and not read; empty ones are not lent."""


class Borrowed:
    """A `stack.Tier` and a `base.split.PrefillServers`."""

    rank = 2
    nbytes = 0

    def __init__(
        self,
        addresses: Sequence[str],
        secret: bytes | None,
        terms: wire.Terms,
        sizes: Sequence[int],
    ) -> None:
        """`sizes`: bytes of a block of each group. Raises `PackageAbsent`."""
        self._zmq = wire.zeromq()
        self._terms, self._sizes, self.stats = terms, sizes, SplitStats()
        self._engine = terms.root.hex()[:32]
        self._context = self._zmq.Context()
        most = max(sizes) + HEAD_BYTES + 4096
        self._servers = [
            _Server(address, wire.asking(self._context, address, secret, max(most, 1 << 16)))
            for address in addresses
        ]
        self.on_end: Callable[[int, bool], None] = lambda ticket, good: None
        """Told of each order's end, in any thread."""
        self._loans: dict[int, _Loan] = {}
        self._there: list[dict[bytes, tuple[_Loan, int]]] = [{} for _ in sizes]
        """Per group: what is lent, the loan and the place in its prompt."""
        self._changed = threading.Condition()
        """Guards all of the above."""
        self._unsaid: deque[tuple[_Server, Any]] = deque()
        self._heard = Wake()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="headrace-borrowing", daemon=True)
        self._thread.start()

    # The engine's thread

    def ahead(self) -> float | None:
        with self._changed:
            return min((one.load for one in self._servers if one.answers), default=None)

    def ask(self, ticket: int, handed: Handed, keys: list[bytes], seconds: float) -> None:
        with self._changed:
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
        with self._changed:
            if (loan := self._loans.get(ticket)) is not None:
                self.stats.left += not loan.lent
                self._end(loan)

    def close(self) -> None:
        with self._changed:
            for loan in list(self._loans.values()):
                self._end(loan)
        self._open = False
        self._heard.ring()
        self._thread.join(5.0)
        self._heard.close()

    # Readers

    def exists(self, group: int) -> Container[bytes]:
        return self._there[group]

    def expect(self, key: bytes, group: int, tenant: str) -> None:
        with self._changed:
            if (found := self._there[group].get(key)) is not None:
                self._want(found[0], (group, found[1]))

    def read(self, key: bytes, group: int, tenant: str, size: int, age: int) -> Bytes | None:
        with self._changed:
            found = self._there[group].get(key)
            if found is None:
                return None
            loan, place = found[0], (group, found[1])
            self._want(loan, place)
            came = self._changed.wait_for(lambda: place in loan.came or loan.ended, FETCH_SECONDS)
            data = loan.came.pop(place, None)
            self._forget(key, group, loan)
            if not came:
                self._lost(loan.server, "sent no block in time")
        if data is None or len(data) != HEAD_BYTES + size:
            return None
        block = memoryview(data)
        content = block[HEAD_BYTES:]
        if block[:HEAD_BYTES] != block_head(self._engine, key, group, [content]):
            log.warning(
                "a block of %s has another digest: it is computed here", loan.server.address
            )
            return None
        return content

    def write(
        self, key: bytes, group: int, tenant: str, parts: Sequence[memoryview], age: int
    ) -> bool:
        return False

    def drop(self, key: bytes, group: int, tenant: str) -> None:
        with self._changed:
            self._there[group].pop(key, None)

    def look(self, *, again: bool = False) -> None:
        """What is lent is told."""

    def forget(self) -> None:
        with self._changed:
            for loan in list(self._loans.values()):
                self._end(loan)

    # With the lock

    def _want(self, loan: _Loan, place: Place) -> None:
        if place not in loan.asked and not loan.ended:
            loan.asked.add(place)
            self._say(loan.server, wire.Fetch(loan.ticket, [place]))

    def _forget(self, key: bytes, group: int, loan: _Loan) -> None:
        """It was read, or will not come."""
        found = self._there[group].get(key)
        if found is not None and found[0] is loan:
            del self._there[group][key]

    def _lend(self, loan: _Loan, firsts: list[int]) -> None:
        loan.lent, loan.until = True, time.monotonic() + HELD_SECONDS
        for there, first in zip(self._there, firsts, strict=False):
            for at in range(max(0, first), len(loan.keys)):
                there[loan.keys[at]] = loan, at

    def _end(self, loan: _Loan, *, said: bool = False) -> None:
        """Whatever its state; `said`: by the server."""
        loan.ended = True
        del self._loans[loan.ticket], loan.server.loans[loan.ticket]
        if loan.lent:
            for group in range(len(self._there)):
                for key in loan.keys:
                    self._forget(key, group, loan)
        loan.came.clear()
        self._changed.notify_all()
        if not said:
            self._say(loan.server, wire.Release([loan.ticket]))
        if not loan.lent:
            self.on_end(loan.ticket, False)

    def _lost(self, server: _Server, why: str) -> None:
        """A server is gone, or might as well be: nothing more is expected of it."""
        if server.answers:
            log.warning("the prefill server %s %s", server.address, why)
        server.answers, server.hail_at = False, 0.0
        for loan in list(server.loans.values()):
            self.stats.failed += not loan.lent
            self._end(loan)

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
            log.exception("nothing is handed over any more")
            with self._changed:
                for server in self._servers:
                    self._lost(server, "is not heard any more")
        finally:
            self._context.destroy(linger=100)

    def _speak(self) -> None:
        """Say what waits; fetches of one loan in a row are one message."""
        while self._unsaid:
            server, what = self._unsaid.popleft()
            if isinstance(what, wire.Fetch):
                while self._unsaid and len(what.places) < wire.MOST_FETCHED:
                    more = self._unsaid[0][1]
                    if not isinstance(more, wire.Fetch) or more.ticket != what.ticket:
                        break
                    self._unsaid.popleft()
                    what.places += more.places
            self._send(server, what)

    def _send(self, server: _Server, what: Any) -> None:
        # Not connected, or it takes nothing: then its silence says so soon.
        with suppress(self._zmq.Again):
            server.socket.send(wire.pack(what), self._zmq.NOBLOCK)

    def _renew(self, now: float) -> None:
        with self._changed:
            for loan in list(self._loans.values()):
                if now > loan.until:
                    self.stats.failed += not loan.lent
                    self._end(loan)
            for server in self._servers:
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
                frames = server.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message = wire.to_decode.decode(frames[0].buffer)
            except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
                log.warning("%s says something of another form", server.address)
                continue
            with self._changed:
                server.heard = time.monotonic()
                self._heard_of(server, message, frames[1].buffer if len(frames) == 2 else b"")

    def _heard_of(self, server: _Server, message: Any, data: Any) -> None:
        match message:
            case wire.Welcome():
                if not server.answers:
                    log.info("the prefill server %s answers", server.address)
                server.answers = True
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
            case wire.Lent(ticket, firsts):
                loan = server.loans.get(ticket)
                if loan is not None and not loan.lent:
                    self._lend(loan, firsts)
                    self.on_end(ticket, True)
            case wire.Declined(ticket, why):
                loan = server.loans.get(ticket)
                if loan is not None:
                    log.info("%s does not compute a prompt: %.200s", server.address, why)
                    self.stats.declined += not loan.lent
                    self._end(loan, said=True)
            case wire.BlockSent(ticket, group, at):
                loan = server.loans.get(ticket)
                if loan is not None and (group, at) in loan.asked:
                    loan.came[group, at] = data
                    self._changed.notify_all()
