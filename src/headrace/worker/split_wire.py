"""What a decode server and a prefill server say to each other, and the sockets between them.

ZeroMQ over TCP or a socket of the file system; each message is a tagged array in msgpack, a block
is a second frame behind `BlockSent`. With a key file both ends are CURVE sockets: everything is
encrypted, and a client needs to know the server's public key, which is derived from the file and
never sent, so whoever has not got the file gets no answer.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from ..base.errors import OptionError
from ..base.extras import needed
from ..base.identity import Identity
from ..base.split import Handed

RENEW_SECONDS = 0.25
"""How often a decode server says what it still wants, which says as well that it is there."""
SILENT_SECONDS = 1.5
"""A side that said nothing for so long is gone."""
MOST_MESSAGE = 8 << 20
"""Bytes of one message without a block: a prompt of a million tokens."""
MOST_OPEN = 1024
"""Prompts of one decode server that are open at the same time."""
MOST_FETCHED = 64
"""Blocks that one message asks for."""


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


class Fetch(_SplitMessage):
    """Blocks of one lease, as (group, place in the prompt). Each is answered by a `BlockSent`."""

    ticket: int
    places: list[tuple[int, int]]


class Release(_SplitMessage):
    tickets: list[int]


class Renew(_SplitMessage):
    """Said every `RENEW_SECONDS`; answered by `Alive`, or by `Stranger`."""

    tickets: list[int]


# Prefill server → decode server.


class Welcome(_SplitMessage):
    pass


class Unlike(_SplitMessage):
    """Equal names would not mean equal bytes."""

    differences: list[str]


class Lent(_SplitMessage):
    ticket: int
    firsts: list[int]
    """The first block that is held, of each group."""


class Declined(_SplitMessage):
    ticket: int
    why: str


class BlockSent(_SplitMessage):
    """A block is the next frame: a head with a digest, then its bytes. Empty: it is not lent."""

    ticket: int
    group: int
    at: int


class Alive(_SplitMessage):
    ahead: float
    """Seconds of prompts that wait or are in work."""


class Stranger(_SplitMessage):
    """This server knows nothing of you (it began anew): say `Hail`."""


ToPrefill = Hail | Compute | Fetch | Release | Renew
ToDecode = Welcome | Unlike | Lent | Declined | BlockSent | Alive | Stranger

pack = msgspec.msgpack.Encoder().encode
to_prefill = msgspec.msgpack.Decoder(ToPrefill)
to_decode = msgspec.msgpack.Decoder(ToDecode)


def zeromq() -> Any:
    """The module. Raises `PackageAbsent`."""
    return needed("zmq", "a prefill/decode split", "split")


def listening(context: Any, address: str, secret: bytes | None) -> Any:
    """The socket of a prefill server. Raises `OptionError` where the address cannot be had."""
    zmq = zeromq()
    socket = context.socket(zmq.ROUTER)
    # Who is gone gets nothing, and an exception says so, instead of waiting for it.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE)
    socket.setsockopt(zmq.LINGER, 0)
    if secret is not None:
        socket.curve_secretkey, _ = _pair(secret, b"prefill")
        socket.curve_server = True
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise OptionError(f"role: {address} cannot be had: {error}", param="role") from None
    return socket


def asking(context: Any, address: str, secret: bytes | None, most: int) -> Any:
    """The socket to one prefill server, which connects when that is there. `most`: bytes of one
    message."""
    zmq = zeromq()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.MAXMSGSIZE, most)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    # What could not be said to a server that is gone would be old news to its successor.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    if secret is not None:
        socket.curve_secretkey, socket.curve_publickey = _pair(secret, b"decode")
        socket.curve_serverkey = _pair(secret, b"prefill")[1]
    socket.connect(address)
    return socket


def _pair(secret: bytes, side: bytes) -> tuple[bytes, bytes]:
    """(secret key, public key) of a side, as ZeroMQ writes them."""
    zmq, z85 = zeromq(), needed("zmq.utils.z85", "keys of a split", "split")
    key: bytes = z85.encode(blake2b(secret, digest_size=32, person=side).digest())
    return key, zmq.curve_public(key)
