"""A replica as the gateway sees it: its load, its health, and how long it is left alone.

Health is asked once in `PROBE_SECONDS`. A replica that says 503 gets nothing new and keeps what it
has, which is how one is drained. One that nobody can connect to, or that has said nothing for
`SILENT_SECONDS`, is dead: its connections are ended, so that what it had goes on elsewhere. One
that is late is busy: it gets nothing new for a while, and nothing of it is lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import msgspec

from ..base.errors import OptionError
from ..base.foreign import Undecodable, json_reader
from .upstream import Connections, ReplicaLost, Upstream

PROBE_SECONDS = 0.5
LATE_SECONDS = 2.0
"""How long a probe waits for its answer."""
REFUSED = 2
"""Probes in a row without a connection or cut off, after which a replica is dead."""
BUSY_SECONDS, SILENT_SECONDS = 5.0, 20.0
"""Without any answer: nothing new is sent; the replica is dead."""
FAILURES = 3
"""Lost exchanges in a row after which the circuit is open."""
MOST_HEALTH = 4096
"""Bytes of an answer to a probe that are read."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds of an open circuit: twice as long with each further failure."""


class _HealthReply(msgspec.Struct):
    role: str = "both"


class Replica:
    """One server behind the gateway."""

    def __init__(self, number: int, url: str) -> None:
        """Raises `OptionError` where the address is none."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise OptionError(f"{url!r} is not an http address", param="servers")
        self.number = number
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.host = parts.netloc.rpartition("@")[2].encode()
        self.address = ""
        """Where its last probe was answered, as `ip:port`: a name may come to mean another host."""
        self.connections = Connections(parts.hostname, port, parts.scheme == "https")
        self.outstanding = 0
        """Requests of this gateway that have not ended."""
        self.others = 0
        """Requests that others sent it, as far as it tells (`holdings`)."""
        self.tells = False
        """Does it tell what its cache holds?"""
        self.ready = True
        """What its last probe said; before the first, that it may be tried."""
        self.prefills = False
        """Is it there to compute prompts for others? Then it answers only where nobody else can."""
        self._refused = 0
        self._heard = time.monotonic()
        self._failures = 0
        self._closed_until = 0.0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Counts a request, however it ends."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1

    @property
    def load(self) -> int:
        """Requests that have not ended, whoever sent them."""
        return self.outstanding + self.others

    @property
    def may_be_chosen(self) -> bool:
        """Ready, and its circuit closed; after a pause one request at a time is a trial."""
        if not self.ready:
            return False
        if self._failures < FAILURES:
            return True
        return time.monotonic() >= self._closed_until and not self.outstanding

    def failed(self) -> None:
        """An exchange was lost. Those lost while its circuit is open are of the same death."""
        if self._failures >= FAILURES and time.monotonic() < self._closed_until:
            return
        self._failures += 1
        further = max(0, min(self._failures - FAILURES, 16))
        self._closed_until = time.monotonic() + min(LONGEST_PAUSE, SHORTEST_PAUSE * 2**further)

    def succeeded(self) -> None:
        """An exchange got its answer."""
        self._failures = 0

    async def ask(self, request: bytes) -> Upstream:
        """The connection on which an answer has begun. Raises `ReplicaLost`.

        A kept connection that closed as the request went out says nothing of the replica: the same
        goes once more over a new one.
        """
        for new in (False, True):
            connection = await self.connections.take(new=new)
            kept = connection.used
            try:
                await connection.ask(request)
            except BaseException as error:
                self.connections.give_back(connection)
                if isinstance(error, ReplicaLost) and kept and not new:
                    continue
                raise
            return connection
        raise AssertionError("a new connection was never used")

    async def probe(self) -> None:
        """Ask for its health once and remember the answer."""
        request = b"GET /health HTTP/1.1\r\nhost: " + self.host + b"\r\n\r\n"
        try:
            async with asyncio.timeout(LATE_SECONDS):
                connection = await self.ask(request)
                body, peer = b"", connection.peer
                try:
                    while part := await connection.part():
                        body = (body + part)[:MOST_HEALTH]
                finally:
                    self.connections.give_back(connection)
            self.address = peer or self.address
            self.prefills = _role(body) == "prefill"
            # Some servers have no such route: whoever answers 404 is there.
            self.ready = connection.status < 300 or connection.status == 404
            self._refused = 0
            self._heard = time.monotonic()
        except ReplicaLost:
            self.ready = False
            self._refused += 1
            if self._refused == REFUSED:
                self.connections.abort()
        except TimeoutError:
            silent = time.monotonic() - self._heard
            self.ready = self.ready and silent < BUSY_SECONDS
            if silent > SILENT_SECONDS:
                self.connections.abort()

    async def watch(self) -> None:
        """Probe for as long as the gateway runs."""
        while True:
            await self.probe()
            await asyncio.sleep(PROBE_SECONDS)


_health = json_reader(_HealthReply)


def _role(body: bytes) -> str:
    """What an answer of `/health` says of a prefill/decode split."""
    try:
        return _health(body).role
    except Undecodable:
        return "both"  # Another's server says whatever it likes.


def replicas_of(urls: Sequence[str]) -> list[Replica]:
    """The replicas at these addresses. Raises `OptionError`: none, twice the same, no address."""
    found = [Replica(number, url) for number, url in enumerate(urls)]
    if not found:
        raise OptionError("servers must name at least one address", param="servers")
    if len({one.url for one in found}) < len(found):
        raise OptionError("servers names an address twice", param="servers")
    return found
