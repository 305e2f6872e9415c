"""The socket of a prefill server, which receives decode servers' requests.

A thread of its own answers, so that a step of a second delays no renewal. Work for the engine's
thread (prompts to compute, leases to end) waits in a queue. Blocks are sent on lines (`sending`).
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..base.extras import needed
from ..base.split import Handed
from ..dist.wake import Wake
from ..kernels.operators import KvCache
from ..obs.threads import THREADS
from . import split_wire as wire
from .block_line import CIPHERS
from .kv_tensors import PoolMemory
from .sending import Sending

log = logging.getLogger("headrace.split")

Name = tuple[bytes, int]
"""Decode server, and its number for the prompt."""
MOST_BORROWERS = 256


@dataclass(slots=True)
class _Borrower:
    heard: float
    key: bytes
    """Key that encrypts blocks sent to it; empty: not encrypted."""
    number: bytes = field(default_factory=lambda: os.urandom(wire.NUMBER_BYTES))
    """Name of the borrower on lines."""
    open: set[int] = field(default_factory=set)
    """Prompts that it asked for and has not released."""


class LendingSocket:
    """Socket owned by the engine's thread, except for its own thread's work."""

    def __init__(
        self,
        address: str,
        secret: bytes | None,
        terms: wire.Terms,
        cache: Callable[[], KvCache],
        memory: PoolMemory,
        wake: Callable[[], None],
        leases: Any,
        vocabulary: int,
    ) -> None:
        """Listen at `address`. Raises `OptionError` and `PackageAbsent`.

        `cache`: the pool as it lies now, `memory`: where; `vocabulary`: ids of tokens are below it;
        `leases`: a `kv.leases.Leases`, used here only by its thread-safe part.
        """
        self._zmq = wire.zeromq()
        self._terms, self._ring, self._leases, self._secret = terms, wake, leases, secret
        self._vocabulary = vocabulary
        self._context = self._zmq.Context()
        self._socket = wire.listening(self._context, address, secret)
        self.ahead = 0.0
        """Seconds of prompts in work, as the engine's thread last reported."""
        self._asked: deque[tuple[Name, Handed | None]] = deque()
        self._answers: deque[tuple[bytes, Any]] = deque()
        self._borrowers: dict[bytes, _Borrower] = {}
        self._known: dict[bytes, tuple[bytes, bytes]] = {}
        """Borrower and key, by the borrower's number on lines."""
        if secret is not None:
            needed(*CIPHERS)
        try:
            self.lines = Sending(address, cache, memory, leases, self._known.get)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._heard = Wake()
        self._looked = time.monotonic()
        """Time when silences were last looked at."""
        self._open = True
        self._thread = THREADS.keep("lending", self._run)

    # The engine's thread

    def asked(self) -> list[tuple[Name, Handed | None]]:
        """Return the requests since the last call, in order: prompts to compute, and (None) those
        released since; a release may come twice."""
        return [self._asked.popleft() for _ in range(len(self._asked))]

    def lent(self, name: Name, runs: list[tuple[int, list[int]]]) -> None:
        """Report that a prompt is computed and its blocks can be fetched:
        `kv.leases.Leases.lend`."""
        self._say(name[0], wire.Lent(name[1], runs))

    def declined(self, name: Name, why: str) -> None:
        """Report that a prompt is not computed, or no longer lent."""
        self._say(name[0], wire.Declined(name[1], why[:500]))

    def close(self) -> None:
        self._open = False
        self._heard.ring()
        self._thread.join(5.0)
        self.lines.close()
        self._heard.close()

    def _say(self, who: bytes, what: Any) -> None:
        self._answers.append((who, what))
        self._heard.ring()

    # Its own

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._heard.fileno(), zmq.POLLIN)
        while self._open:
            poller.poll(1000 * wire.RENEW_SECONDS)
            self._heard.clear()
            while self._answers:
                who, what = self._answers.popleft()
                if isinstance(what, wire.Declined) and who in self._borrowers:
                    self._borrowers[who].open.discard(what.ticket)
                with THREADS.skipping("lending"):
                    self._send(who, what)
            self._hear()
            self._forget_the_silent()
        self._context.destroy(linger=0)

    def _hear(self) -> None:
        zmq = self._zmq
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                continue
            who, said = frames
            with THREADS.skipping("lending"):
                self._heard_of(who, wire.to_prefill(said))

    def _heard_of(self, who: bytes, message: Any) -> None:
        borrower = self._borrowers.get(who)
        if isinstance(message, wire.Hail):
            self._hailed(who, message.terms)
            return
        if borrower is None:
            self._send(who, wire.Stranger())
            return
        borrower.heard = time.monotonic()
        match message:
            case wire.Renew(tickets):
                self._leases.renew(
                    [(who, ticket) for ticket in borrower.open.intersection(tickets)]
                )
                self._send(who, wire.Alive(self.ahead))
            case wire.Compute(ticket, handed):
                wrong = _wrong(handed, self._terms.block_size, self._vocabulary)
                if ticket in borrower.open or len(borrower.open) >= wire.MOST_OPEN:
                    wrong = f"{len(borrower.open)} prompts are open"
                if wrong:
                    self._send(who, wire.Declined(ticket, wrong))
                    return
                borrower.open.add(ticket)
                self._asked.append(((who, ticket), handed))
                self._ring()
            case wire.Release(tickets):
                for ticket in borrower.open.intersection(tickets):
                    self._let_go((who, ticket))

    def _hailed(self, who: bytes, terms: wire.Terms) -> None:
        differences = terms.differences(self._terms)
        if not differences and who not in self._borrowers and len(self._borrowers) < MOST_BORROWERS:
            key = b"" if self._secret is None else os.urandom(32)
            fresh = self._borrowers[who] = _Borrower(time.monotonic(), key)
            self._known[fresh.number] = who, key
        if differences:
            self._send(who, wire.Unlike(differences[:20]))
        elif who in self._borrowers:
            one = self._borrowers[who]
            self._send(who, wire.Welcome(one.number, one.key, self.lines.near))

    def _let_go(self, name: Name) -> None:
        self._borrowers[name[0]].open.discard(name[1])
        self._asked.append((name, None))
        self._ring()

    def _forget_the_silent(self) -> None:
        now = time.monotonic()
        # What borrowers said while this process slept may still be on its way.
        slept, self._looked = now - self._looked > wire.SILENT_SECONDS / 2, now
        for who, borrower in list(self._borrowers.items()):
            if slept:
                borrower.heard = now
            if now - borrower.heard > wire.SILENT_SECONDS:
                for ticket in list(borrower.open):
                    self._let_go((who, ticket))
                del self._borrowers[who], self._known[borrower.number]

    def _send(self, who: bytes, what: Any) -> None:
        """Send a message; drop it if the peer is gone or does not receive."""
        zmq = self._zmq
        try:
            self._socket.send_multipart([who, wire.pack(what)], zmq.NOBLOCK)
        except zmq.ZMQError as refused:
            if refused.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise


def _wrong(handed: Handed, block_size: int, vocabulary: int) -> str:
    """Check a request; return the fault in words, or an empty string."""
    if not 0 <= handed.first < handed.blocks or len(handed.tokens) < handed.blocks * block_size:
        return f"blocks {handed.first} to {handed.blocks} of {len(handed.tokens)} tokens"
    if min(handed.tokens) < 0 or max(handed.tokens) >= vocabulary:
        return f"tokens are numbers from 0 to {vocabulary - 1}"
    return ""
