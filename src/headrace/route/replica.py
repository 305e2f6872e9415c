"""The gateway's view of a replica: its load, its health, and how long it is avoided.

Health is probed every `PROBE_SECONDS`. A replica that answers 503 gets nothing new and keeps its
requests, so it can be drained. A replica that refuses connections, or has been silent for
`SILENT_SECONDS`, is dead. Its connections are closed, so that its requests continue elsewhere. A
replica that answers late is busy: it gets no new requests for a while and keeps its own.
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
from .upstream import Connections, Headers, ReplicaLost, Upstream

PROBE_SECONDS = 0.5
LATE_SECONDS = 2.0
"""Seconds that a probe waits for its answer."""
REFUSED = 2
"""Consecutive probes without a connection, or cut off, after which a replica is dead."""
BUSY_SECONDS, SILENT_SECONDS = 5.0, 20.0
"""Seconds without any answer: after the first value no new request is sent; after the second the
replica is dead."""
FAILURES = 3
"""Consecutive lost exchanges after which the circuit opens."""
MOST_HEALTH = 4096
"""Maximum bytes read of a probe's answer."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds that the circuit stays open; each further failure doubles them."""
MODELS_SECONDS = 30.0
"""Seconds between two requests for its model list, which is shown but decides nothing."""
MOST_LIST = 64 * 1024
"""Maximum bytes read of a model list."""
MOST_MODELS, MOST_NAME = 32, 120
"""Maximum models shown of one replica, and characters of a name."""


class _HealthReply(msgspec.Struct):
    role: str = "both"


class _ListedModel(msgspec.Struct):
    id: str


class _ListedModels(msgspec.Struct):
    data: list[_ListedModel]


_health_reply = json_reader(_HealthReply)
_model_list = json_reader(_ListedModels)


class Replica:
    """One server that the gateway forwards to."""

    def __init__(self, number: int, url: str) -> None:
        """Create a replica. Raises `OptionError` if `url` is not an address, or holds a user or
        password."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        name = parts.netloc.rpartition("@")[2]
        shown = f"{parts.scheme}://{name}"
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise OptionError(f"{shown!r} is not an http address", param="servers")
        if name != parts.netloc:  # They would never be sent, and clients see addresses.
            raise OptionError(
                f"servers must name addresses without user and password, as in {shown}; clients "
                "send their own",
                param="servers",
            )
        self.number = number
        self.url = shown
        self.host = name.encode()
        self.address = ""
        """Address (`ip:port`) that answered its last probe: a name may move to another host."""
        self.connections = Connections(parts.hostname, port, parts.scheme == "https")
        self.outstanding = 0
        """Requests of this gateway that have not ended."""
        self.others = 0
        """Requests from other senders, according to its own report (`holdings`)."""
        self.tells = False
        """Whether it reports the contents of its cache."""
        self.ready = True
        """Whether its last probe succeeded; True before the first, so that it may be tried."""
        self.problem = ""
        """Reason why it is not ready."""
        self.prefills = False
        """Whether it computes prompts for other servers; then it answers only if no other can."""
        self.leaving = False
        """Whether no source names it any more: it gets no new requests and finishes its own."""
        self.models: tuple[str, ...] = ()
        """Names of its models in its last list."""
        self._listed = 0.0
        self._refused = 0
        self._heard = time.monotonic()
        self._failures = 0
        self._closed_until = 0.0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Count a request, however it ends."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1

    @property
    def load(self) -> int:
        """Requests in work, from all senders."""
        return self.outstanding + self.others

    @property
    def may_be_chosen(self) -> bool:
        """Whether it may get a request: it is ready and its circuit closed. After the circuit's
        pause one request at a time is a trial."""
        if not self.ready or self.leaving:
            return False
        if self._failures < FAILURES:
            return True
        return time.monotonic() >= self._closed_until and not self.outstanding

    @property
    def state(self) -> str:
        """Ready, or the reason why nothing is sent."""
        if self.leaving:
            return "leaving: no source names it"
        if not self.ready:
            return f"not ready: {self.problem}"
        return "ready" if self.may_be_chosen else f"left alone after {self._failures} losses"

    def failed(self) -> None:
        """Count a lost exchange. Losses while the circuit is open belong to the same death."""
        if self._failures >= FAILURES and time.monotonic() < self._closed_until:
            return
        self._failures += 1
        further = max(0, min(self._failures - FAILURES, 16))
        self._closed_until = time.monotonic() + min(LONGEST_PAUSE, SHORTEST_PAUSE * 2**further)

    def succeeded(self) -> None:
        """Reset the count of lost exchanges."""
        self._failures = 0

    async def ask(
        self, head: bytes, body: bytes | bytearray = b"", *, seconds: float | None = None
    ) -> Upstream:
        """Send a request; return the connection on which its answer has begun.

        A kept connection that closes as the request goes out says nothing about the replica. The
        request is then sent once more over a new one. `seconds`: longest silence of the replica,
        before the answer's head and within it. Raises `ReplicaLost`.
        """
        for new in (False, True):
            connection = await self.connections.take(new=new)
            kept = connection.used
            try:
                await connection.ask(head, body, seconds=seconds)
            except BaseException as error:
                self.connections.give_back(connection)
                if isinstance(error, ReplicaLost) and kept and not new and not connection.silent:
                    continue
                raise
            return connection
        raise AssertionError("a new connection was never used")

    async def probe(self) -> None:
        """Probe its health once and remember the answer."""
        try:
            status, json, body, peer = await self._get(b"/health", MOST_HEALTH)
        except ReplicaLost as lost:
            self.ready, self.problem = False, lost.message
            self._refused += 1
            if self._refused == REFUSED:
                self.connections.abort()
            return
        except TimeoutError:
            silent = time.monotonic() - self._heard
            if silent >= BUSY_SECONDS:
                self.ready, self.problem = False, "its health is not answered"
            if silent > SILENT_SECONDS:
                self.connections.abort()
            return
        self.address = peer or self.address
        self._refused = 0
        self._heard = time.monotonic()
        self._believe(status, json, body)

    async def _get(self, path: bytes, most: int, key: str = "") -> tuple[int, bool, bytes, str]:
        """Get a small answer; return (status, whether it is JSON, body, peer's address).

        A longer body is cut at `most` + 1 bytes. Raises `ReplicaLost` and `TimeoutError`.
        """
        head = b"GET " + path + b" HTTP/1.1\r\nhost: " + self.host
        if key:
            head += b"\r\nauthorization: Bearer " + key.encode()
        async with asyncio.timeout(LATE_SECONDS):
            connection = await self.ask(head + b"\r\n\r\n")
            body, peer = b"", connection.peer
            try:
                while part := await connection.part():
                    body = (body + part)[: most + 1]
            finally:
                self.connections.give_back(connection)
        return connection.status, _is_json(connection.headers), body, peer

    async def list_models(self, key: str = "") -> None:
        """Request its model names if that is due. They are only shown."""
        now = time.monotonic()
        if not self.ready or now < self._listed:
            return
        self._listed = now + MODELS_SECONDS
        try:
            status, _, body, _ = await self._get(b"/v1/models", MOST_LIST, key)
            listed = _model_list(body).data if status == 200 else []
        except (ReplicaLost, TimeoutError, Undecodable):
            return
        self.models = tuple(one.id[:MOST_NAME] for one in listed[:MOST_MODELS])

    def _believe(self, status: int, json: bool, body: bytes) -> None:
        """Apply an answer of `/health`: its status, and the role in its JSON."""
        role, problem = "both", ""
        # Some servers lack this route: a 404 shows that the server is there.
        if status >= 300 and status != 404:
            problem = f"its health has the status {status}"
        elif len(body) <= MOST_HEALTH:
            try:
                role = _health_reply(body).role
            except Undecodable as error:
                # Other JSON comes from another product's server.
                if json and body and not error.well_formed:
                    problem = "its health is damaged JSON"
        self.prefills = role == "prefill"
        self.ready, self.problem = not problem, problem

    async def watch(self, key: str = "") -> None:
        """Probe for as long as the gateway runs. If probing fails, the replica is not ready.

        `key`: an operator's key of the replica, if it requires keys.
        """
        try:
            while True:
                await self.probe()
                await self.list_models(key)
                await asyncio.sleep(PROBE_SECONDS)
        except Exception as fault:
            self.ready, self.problem = False, f"its probes ended by {type(fault).__name__}"
            raise


def _is_json(headers: Headers) -> bool:
    kinds = [value for name, value in headers if name == b"content-type"]
    return any(b"json" in kind.lower() for kind in kinds)


def replicas_of(urls: Sequence[str]) -> list[Replica]:
    """Return the replicas at these addresses. Raises `OptionError`."""
    found = [Replica(number, url) for number, url in enumerate(urls)]
    if len({one.url for one in found}) < len(found):
        raise OptionError("servers names an address twice", param="servers")
    return found
