"""What a decode server and a prefill server say to each other, and the sockets between them.

ZeroMQ over TCP or a socket of the file system; each message is a tagged array in msgpack. Blocks
come beside it, on lines (`block_line`), at the next port or file. With a key file both ends are
CURVE sockets: everything is encrypted, and a client needs to know the server's public key, which is
derived from the file and never sent, so whoever has not got the file gets no answer. The key of
lines is among what is said so.
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
"""How often a decode server says what it still wants, which says as well that it is there."""
SILENT_SECONDS = 1.5
"""A side that said nothing for so long is gone."""
MOST_MESSAGE = 8 << 20
"""Bytes of one message: a prompt of a million tokens."""
MOST_OPEN = 1024
"""Prompts of one decode server that are open at the same time."""
NUMBER_BYTES = 16
"""What a borrower says first on a line, as `Welcome` had it."""
MOST_QUESTION = 1 << 16
"""Bytes of a `Fetch`."""
RUN_BYTES = 8 << 20
"""What one `Fetch` brings at most, but at least one block."""
SEALED_RUN_BYTES = 1 << 20
"""The same where it goes through a buffer at each end."""
RUN_BLOCKS = 4096
"""A `Fetch` is short."""


class Terms(msgspec.Struct, array_like=True, frozen=True):
    """What both sides have to agree in: then equal names mean equal bytes."""

    root: bytes
    """`kv.prefix.root_of`: follows from all of the others."""
    identity: Identity
    block_size: int
    groups: str
    """What a block of each group holds."""

    def differences(self, other: Terms) -> list[str]:
        """Each with its name; none where the roots are equal."""
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
    """Say who asks. Answered by `Welcome` or `Unlike`."""

    terms: Terms


class Compute(_SplitMessage):
    """Answered by `Lent` or `Declined`."""

    ticket: int
    handed: Handed


class Release(_SplitMessage):
    tickets: list[int]


class Renew(_SplitMessage):
    """Said every `RENEW_SECONDS`; answered by `Alive`, or by `Stranger`."""

    tickets: list[int]


# Prefill server → decode server.


class Welcome(_SplitMessage):
    number: bytes
    """A line begins with it, `NUMBER_BYTES` long: it says whose the line is."""
    key: bytes
    """Lines are encrypted under keys made of it; empty: they are not encrypted."""
    near: str
    """Name of a socket of this host (Linux's, in no folder) where lines end, too; or empty."""


class Unlike(_SplitMessage):
    """Equal names would not mean equal bytes."""

    differences: list[str]


class Lent(_SplitMessage):
    ticket: int
    runs: list[tuple[int, list[int]]]
    """For each group the place in the prompt of the first block that is held, and all of them."""


class Declined(_SplitMessage):
    ticket: int
    why: str


class Alive(_SplitMessage):
    ahead: float
    """Seconds of prompts that wait or are in work."""


class Stranger(_SplitMessage):
    """This server knows nothing of you (it began anew): say `Hail`."""


ToPrefill = Hail | Compute | Release | Renew
ToDecode = Welcome | Unlike | Lent | Declined | Alive | Stranger


class PoolThere(msgspec.Struct, array_like=True):
    """The first that is said on a line."""

    at: int
    """Where the pool begins in the file that was given, if one was."""
    blocks: list[int]
    """How many it has, of each group."""


class Fetch(msgspec.Struct, array_like=True):
    """What is asked on a line, blocks of one lease by their places in the prompt. Answered by the
    names of the first of them, up to one that is not lent, and their bytes."""

    ticket: int
    group: int
    places: list[int]
    copied: bool = False
    """They were copied, and only names are wanted of what was lent until now."""


pack = msgspec.msgpack.Encoder().encode
to_prefill = msgpack_reader(ToPrefill)
to_decode = msgpack_reader(ToDecode)
to_fetch = msgpack_reader(Fetch)
to_pool = msgpack_reader(PoolThere)


def run_blocks(nbytes: int, *, sealed: bool) -> int:
    """Blocks of so many bytes that one `Fetch` brings."""
    most = SEALED_RUN_BYTES if sealed else RUN_BYTES
    return max(1, min(RUN_BLOCKS, most // nbytes))


def lines_at(address: str) -> tuple[socket.AddressFamily, Any]:
    """Where the lines of a prefill server of this address end: a kind of socket and its address."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return socket.AF_UNIX, f"{rest}-blocks"
    host, _, port = rest.rpartition(":")
    host = host.strip("[]").replace("*", "")
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port) + 1)


def zeromq() -> Any:
    """The module. Raises `PackageAbsent`."""
    return needed("zmq", "a prefill/decode split", "split")


def listening(context: Any, address: str, secret: bytes | None) -> Any:
    """The socket of a prefill server. Raises `OptionError` where the address cannot be had."""
    zmq = zeromq()
    sock = context.socket(zmq.ROUTER)
    # Who is gone gets nothing, and an exception says so, instead of waiting for it.
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
    """The socket to one prefill server, which connects when that is there."""
    zmq = zeromq()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # What could not be said to a server that is gone would be old news to its successor.
    sock.setsockopt(zmq.IMMEDIATE, 1)
    if secret is not None:
        sock.curve_secretkey, sock.curve_publickey = _pair(secret, b"decode")
        sock.curve_serverkey = _pair(secret, b"prefill")[1]
    sock.connect(address)
    return sock


def _pair(secret: bytes, side: bytes) -> tuple[bytes, bytes]:
    """(secret key, public key) of a side, as ZeroMQ writes them."""
    zmq, z85 = zeromq(), needed("zmq.utils.z85", "keys of a split", "split")
    key: bytes = z85.encode(blake2b(secret, digest_size=32, person=side).digest())
    return key, zmq.curve_public(key)
