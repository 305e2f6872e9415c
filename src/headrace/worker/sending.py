"""The lines of a prefill server: a thread for each, which sends blocks while they are lent.

A borrower of the same user on the same host gets the pool's memory to read, and copies blocks
itself. Afterwards it asks which of them were lent until then.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..base.errors import OptionError
from ..base.foreign import Undecodable
from ..base.tiers import KEY_BYTES
from ..kernels.operators import KvCache
from ..obs.threads import THREADS
from . import split_wire as wire
from .block_line import BlockLine, is_same_user
from .kv_tensors import PoolMemory
from .places import places_of

log = logging.getLogger("headrace.split")

MOST_LINES = 512
LOOK_SECONDS = 0.25
"""Seconds between checks of an idle line whether its borrower is still known."""
OPEN_SECONDS = 1.0
"""Seconds in which a line must say whose it is."""
TAKE_SECONDS = 30.0
"""Seconds of a send. A borrower takes a block when its steps leave time."""

Known = Callable[[bytes], tuple[bytes, bytes] | None]
"""Look-up of a borrower's number → (borrower, its key); None if unknown."""


class Sending:
    """Listener that answers on each line until its borrower is gone."""

    def __init__(
        self,
        address: str,
        cache: Callable[[], KvCache],
        memory: PoolMemory,
        leases: Any,
        known: Known,
    ) -> None:
        """Listen. `cache`: the pool as it lies now, `memory`: where; `leases`: a
        `kv.leases.Leases`. Raises `OptionError`."""
        self._cache, self._memory, self._leases, self._known = cache, memory, leases, known
        self.near = ""
        """Name at which this host's processes reach it as well."""
        self.sent_bytes = 0
        self._listeners = [_listening(address)]
        if address.startswith("tcp:") and memory.file >= 0:
            self.near = f"headrace-{os.urandom(16).hex()}"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0{self.near}")
            self._listeners.append(listener)
        for listener in self._listeners:
            listener.listen(64)
        self._lines: set[socket.socket] = set()
        self._open = True
        self._thread = THREADS.keep("lines", self._listen)

    def close(self) -> None:
        self._open = False
        self._thread.join(5.0)
        for sock in list(self._lines):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            while self._open:
                for ready, _ in selector.select(LOOK_SECONDS):
                    assert isinstance(ready.fileobj, socket.socket)
                    try:
                        self._accept(ready.fileobj.accept()[0])
                    except OSError as refused:  # It stays ready until there is a descriptor.
                        log.warning("a line cannot be accepted: %s", refused)
                        time.sleep(LOOK_SECONDS)
        for listener in self._listeners:
            if listener.family == socket.AF_UNIX and listener.getsockname()[:1] != b"\0":
                with suppress(OSError):
                    os.unlink(listener.getsockname())
            listener.close()

    def _accept(self, sock: socket.socket) -> None:
        if len(self._lines) >= MOST_LINES:
            sock.close()
            return
        self._lines.add(sock)
        if THREADS.errand("line", self._serve, sock) is None:
            self._lines.discard(sock)
            sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(OPEN_SECONDS)
            number = sock.recv(wire.NUMBER_BYTES, socket.MSG_WAITALL)
            if (found := self._known(number)) is not None:
                self._answer_on(sock, number, *found)
        except (OSError, Undecodable) as ended:
            log.debug("a line ends: %s", ended)
        finally:
            self._lines.discard(sock)
            sock.close()

    def _answer_on(self, sock: socket.socket, number: bytes, who: bytes, key: bytes) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cache, near = self._cache(), self._memory.file >= 0 and is_same_user(sock)
        line = BlockLine(sock, key, asks=False, seconds=TAKE_SECONDS)
        places = places_of(cache)
        if near:
            file = os.open(f"/proc/self/fd/{self._memory.file}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(sock, [b"+"], [file])
            finally:
                os.close(file)
        elif sock.family == socket.AF_UNIX:
            sock.sendall(b"-")
        line.send(wire.pack(wire.PoolThere(self._memory.at, [one.blocks for one in places])))

        def lent() -> list[Any]:
            found: list[Any] = self._leases.lent(
                (who, asked.ticket), asked.group, asked.places[:most]
            )
            return found

        def names() -> bytes:
            """Return names of blocks that are still lent, and zeros for those no longer lent."""
            left = lent()[: len(read)]
            self.sent_bytes += len(left) * of.nbytes
            said = b"".join(one.key for one in left)
            return said if asked.copied else said.ljust(len(read) * KEY_BYTES, b"\0")

        while self._open and self._known(number) is not None:
            sock.settimeout(LOOK_SECONDS)
            try:
                sock.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                continue
            question = bytes(line.receive(wire.MOST_QUESTION))
            asked = wire.to_fetch(question)
            if cache is not self._cache() or not 0 <= asked.group < len(places):
                return
            of = places[asked.group]
            most = wire.run_blocks(of.nbytes, sealed=bool(key) and not asked.copied)
            read = lent()
            if asked.copied:
                line.send(names(), question)
            else:
                line.send_blocks(of, [one.block for one in read], names, question)


def _listening(address: str) -> socket.socket:
    """Return a socket on which the blocks of the prefill server at this address are fetched."""
    kind, where = wire.lines_at(address)
    if kind == socket.AF_UNIX:
        with suppress(OSError):
            os.unlink(where)
    try:
        sock = socket.socket(kind, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except OSError as error:
        raise OptionError(
            f"role: {where}, where the blocks of {address} are fetched, cannot be had: {error}",
            param="role",
        ) from None
    return sock
