"""Messages between decode servers and prefill servers, and the sockets for them.

ZeroMQ over TCP or a Unix socket; each message is a tagged array in msgpack. Blocks come separately,
on lines (`block_line`), at the next port or file. With a key file both ends are CURVE sockets and
everything is encrypted. A client needs the server's public key, which is derived from the file and
never sent: without the file there is no answer. The key of lines is sent in these messages.
"""

from __future__ import annotations

import socket
from hashlib import blake2b
from typing import Any

import msgspec

from ..base.errors import OptionError
from ..base.extras import needed
from ..base.foreign import msgpack_reader
from ..base.identity import Identity
from ..base.split import Handed

RENEW_SECONDS = 0.25
"""Seconds between a decode server's renewals, which also show that it is alive."""
SILENT_SECONDS = 1.5
"""Seconds of silence after which a side counts as gone."""
MOST_MESSAGE = 8 << 20
"""Bytes of one message: a prompt of a million tokens."""
MOST_OPEN = 1024
"""Prompts of one decode server that are open at the same time."""
NUMBER_BYTES = 16
"""Bytes that a borrower sends first on a line: the number in its `Welcome`."""
MOST_QUESTION = 1 << 16
"""Bytes of a `Fetch`."""
RUN_BYTES = 8 << 20
"""Largest number of bytes that one `Fetch` brings, if more than one block."""
SEALED_RUN_BYTES = 1 << 20
"""Largest number of bytes if they go through a buffer at each end."""
RUN_BLOCKS = 4096
"""Largest number of blocks of one `Fetch`, which keeps it short."""


class Terms(msgspec.Struct, array_like=True, frozen=True):
    """Terms that both sides must have in common: then equal names mean equal bytes."""

    root: bytes
    """Root of names (`kv.prefix.root_of`), which follows from all of the others."""
    identity: Identity
    block_size: int
    groups: str
    """Arrays of a block of each group."""

    def differences(self, other: Terms) -> list[str]:
        """List the differences, each with its name; empty if the roots are equal."""
        if self.root == other.root:
            return []
        found = self.identity.differences(other.identity)
        for name in ("block_size", "groups"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                found.append(f"{name}: {here}, there {there}")
        return found or ["the names of blocks"]


class _SplitMessage(msgspec.Struct, array_like=True, tag=True):
    pass


# Decode server → prefill server.


class Hail(_SplitMessage):
    """Greeting of a decode server. Answered by `Welcome` or `Unlike`."""

    terms: Terms


class Compute(_SplitMessage):
    """Request to compute a prompt. Answered by `Lent` or `Declined`."""

    ticket: int
    handed: Handed


class Release(_SplitMessage):
    tickets: list[int]


class Renew(_SplitMessage):
    """Renewal of leases every `RENEW_SECONDS`; answered by `Alive`, or by `Stranger`."""

    tickets: list[int]


# Prefill server → decode server.


class Welcome(_SplitMessage):
    number: bytes
    """Number, `NUMBER_BYTES` long, with which the borrower's lines begin."""
    key: bytes
    """Key from which the keys of lines are made; empty: lines are not encrypted."""
    near: str
    """Name of a local socket (Linux's abstract kind) where lines end too; or empty."""


class Unlike(_SplitMessage):
    """Refusal because equal names would not mean equal bytes."""

    differences: list[str]


class Lent(_SplitMessage):
    ticket: int
    runs: list[tuple[int, list[int]]]
    """For each group, the place in the prompt of the first held block, and all blocks."""


class Declined(_SplitMessage):
    ticket: int
    why: str


class Alive(_SplitMessage):
    ahead: float
    """Seconds of prompts that wait or are in work."""


class Stranger(_SplitMessage):
    """Answer to an unknown borrower, after this server restarted: say `Hail`."""


ToPrefill = Hail | Compute | Release | Renew
ToDecode = Welcome | Unlike | Lent | Declined | Alive | Stranger


class PoolThere(msgspec.Struct, array_like=True):
    """First message on a line."""

    at: int
    """Offset of the pool in the file that was passed, if any."""
    blocks: list[int]
    """Number of the pool's blocks by group."""


class Fetch(msgspec.Struct, array_like=True):
    """Request on a line: blocks of one lease by their places in the prompt. Answered by the names
    of the first of them, up to one that is not lent, and their bytes."""

    ticket: int
    group: int
    places: list[int]
    copied: bool = False
    """Blocks were copied already: only the names of those still lent are wanted."""


pack = msgspec.msgpack.Encoder().encode
to_prefill = msgpack_reader(ToPrefill)
to_decode = msgpack_reader(ToDecode)
to_fetch = msgpack_reader(Fetch)
to_pool = msgpack_reader(PoolThere)


def run_blocks(nbytes: int, *, sealed: bool) -> int:
    """Return how many blocks of `nbytes` one `Fetch` brings."""
    most = SEALED_RUN_BYTES if sealed else RUN_BYTES
    return max(1, min(RUN_BLOCKS, most // nbytes))


def lines_at(address: str) -> tuple[socket.AddressFamily, Any]:
    """Return a kind of socket and the address where this prefill server's lines end."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return socket.AF_UNIX, f"{rest}-blocks"
    host, _, port = rest.rpartition(":")
    host = host.strip("[]").replace("*", "")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port) + 1)


def zeromq() -> Any:
    """Return the ZeroMQ module. Raises `PackageAbsent`."""
    return needed("zmq", "a prefill/decode split", "split")


def listening(context: Any, address: str, secret: bytes | None) -> Any:
    """Bind the socket of a prefill server. Raises `OptionError` if the address is unavailable."""
    zmq = zeromq()
    sock = context.socket(zmq.ROUTER)
    # A message to a peer that is gone raises an exception instead of being kept.
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    sock.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE)
    sock.setsockopt(zmq.LINGER, 0)
    if secret is not None:
        sock.curve_secretkey, _ = _pair(secret, b"prefill")
        sock.curve_server = True
    try:
        sock.bind(address)
    except zmq.ZMQError as error:
        sock.close()
        raise OptionError(f"role: {address} cannot be had: {error}", param="role") from None
    return sock


def asking(context: Any, address: str, secret: bytes | None) -> Any:
    """Make the socket to one prefill server; it connects when that server is there."""
    zmq = zeromq()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # A message kept for a server that is gone would be stale for its successor.
    sock.setsockopt(zmq.IMMEDIATE, 1)
    if secret is not None:
        sock.curve_secretkey, sock.curve_publickey = _pair(secret, b"decode")
        sock.curve_serverkey = _pair(secret, b"prefill")[1]
    sock.connect(address)
    return sock


def _pair(secret: bytes, side: bytes) -> tuple[bytes, bytes]:
    """Return (secret key, public key) of a side, in ZeroMQ's encoding."""
    zmq, z85 = zeromq(), needed("zmq.utils.z85", "keys of a split", "split")
    key: bytes = z85.encode(blake2b(secret, digest_size=32, person=side).digest())
    return key, zmq.curve_public(key)
