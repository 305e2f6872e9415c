"""A line: a connection that carries blocks of leases, next to the socket of messages.

    length of the content, 4 bytes; the content; its digest or tag, 16 bytes

Blocks go from pool to pool through the socket alone. Damage is found after the blocks were written,
but nothing refers to these blocks yet.

With a key each frame is AES-256-GCM. Its nonce is the frame's number, so a frame cannot be
repeated, moved or forged. Each line has its own key, made from the borrower's key and 16 random
bytes of each end.

Without a key both ends are on one machine, where a socket damages bytes no more than memory does. A
128-bit XXH3 then covers messages; of blocks it covers their names. Tag and digest also cover a text
that both ends know, so an answer fits no other question.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from xxhash import xxh3_128

from ..base.extras import needed
from ..base.textlibrary import library
from ..base.tiers import KEY_BYTES
from .places import Places
from .stack import Bytes

MARK_BYTES = 16
SALT_BYTES = 16
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct("<QI")
_MORE = getattr(socket, "MSG_MORE", 0)
"""Flag with which Linux holds bytes back until more follow."""


class OtherBytes(ConnectionError):
    """Bytes received are not the bytes sent."""


class BlockLine:
    """One end of a line. One thread at a time uses it; each wait is bounded."""

    def __init__(self, sock: socket.socket, key: bytes, asks: bool, seconds: float) -> None:
        """Open this end. Raises `OSError` if the other end does not open its own.

        `key`: of the borrower, empty without encryption; `asks`: this is the borrower's end;
        `seconds`: bound of each `send` and `receive`.
        """
        self.sock, self._asks, self._seconds = sock, asks, seconds
        self._sent = self._got = 0
        self._length, self._buffer = memoryview(bytearray(_LENGTH.size)), bytearray()
        self._cipher: Any = None
        if key:
            ours, theirs = os.urandom(SALT_BYTES), bytearray(SALT_BYTES)
            self._write(ours)
            self._fill(memoryview(theirs), time.monotonic() + seconds)
            salts = ours + theirs if asks else theirs + ours
            ciphers = needed(*CIPHERS)
            self._cipher = ciphers.AESGCM(blake2b(salts, key=key, digest_size=32).digest())

    @property
    def sealed(self) -> bool:
        return self._cipher is not None

    @property
    def _through_a_buffer(self) -> bool:
        return self.sealed or library() is None

    def send(self, content: Bytes | bytearray, about: bytes = b"") -> None:
        """Send a frame; `about` is the text known to both ends. Raises `OSError`."""
        self._send(content, content, about)

    def _send(self, content: Bytes | bytearray, marked: Bytes | bytearray, about: bytes) -> None:
        """Send a frame; `marked` is the part of the content that the digest covers."""
        self._sent += 1
        if self._cipher is not None:
            sealed = self._cipher.encrypt(_NONCE.pack(self._sent, self._asks), content, about)
            self._write(_LENGTH.pack(len(content)), sealed)
        else:
            self._write(_LENGTH.pack(len(content)), content, _digest(marked, about))

    def send_blocks(
        self, of: Places, blocks: Sequence[int], names: Callable[[], bytes], about: bytes
    ) -> None:
        """Send the blocks' bytes from where they lie, then the result of `names`, called after they
        were read: `KEY_BYTES` for each. Raises `OSError`."""
        data = len(blocks) * of.nbytes
        size = data + len(blocks) * KEY_BYTES
        if self._through_a_buffer:
            content = self._room(size)
            of.gather(blocks, content[:data])
            content[data:] = names()
            self._send(content, content if self.sealed else content[data:], about)
            return
        self.sock.settimeout(self._seconds)
        self.sock.sendall(_LENGTH.pack(size), _MORE)
        of.send(self.sock.fileno(), blocks, self._seconds)
        said = names()
        self._write(said, _digest(said, about))

    def receive_blocks(self, of: Places, blocks: Sequence[int], about: bytes) -> memoryview:
        """Receive the first blocks of `blocks` into `of`; return the names of those that came.

        Raises `OSError`; then, and where a name is a different one, the blocks hold anything.
        """
        until = time.monotonic() + self._seconds
        each = of.nbytes + KEY_BYTES
        size = self._size(len(blocks) * each, until)
        count = size // each
        if size % each:
            raise ConnectionError(f"{size} bytes came, blocks have {each}")
        data = count * of.nbytes
        if self._through_a_buffer:
            content = self._content(size, until, about, 0 if self.sealed else data)
            of.fill(blocks[:count], content[:data])
            return content[data:]
        of.receive(self.sock.fileno(), blocks[:count], max(1e-3, until - time.monotonic()))
        return self._content(size - data, until, about)

    def receive(self, most: int, about: bytes = b"") -> memoryview:
        """Return the next frame's content, at most `most` bytes; it is valid until the next call.

        Raises `OSError`, also for a frame that is too long; after that the line is of no use.
        """
        until = time.monotonic() + self._seconds
        return self._content(self._size(most, until), until, about)

    def _size(self, most: int, until: float) -> int:
        self._fill(self._length, until)
        (size,) = _LENGTH.unpack(self._length)
        if size > most:
            raise ConnectionError(f"{size} bytes came, at most {most} were expected")
        return int(size)

    def _room(self, size: int) -> memoryview:
        """Return a view of `size` bytes of the one buffer."""
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def _content(self, size: int, until: float, about: bytes, unmarked: int = 0) -> memoryview:
        """Receive the content; the digest does not cover its first `unmarked` bytes."""
        frame = self._room(size + MARK_BYTES)
        self._fill(frame, until)
        self._got += 1
        content = frame[:size]
        if self._cipher is not None:
            nonce = _NONCE.pack(self._got, not self._asks)
            try:
                return memoryview(self._cipher.decrypt(nonce, frame, about))
            except needed(*REFUSALS).InvalidTag:
                raise OtherBytes("what came has another tag") from None
        if frame[size:] != _digest(content[unmarked:], about):
            raise OtherBytes("what came has another digest")
        return content

    def close(self) -> None:
        self.sock.close()

    def _write(self, *parts: Bytes | bytearray) -> None:
        """Write all parts. Raises `TimeoutError` if the other end takes nothing."""
        self.sock.settimeout(self._seconds)
        sent = self.sock.sendmsg(parts)
        for part in parts:
            if sent < len(part):
                self.sock.sendall(memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    def _fill(self, target: memoryview, until: float) -> None:
        got = 0
        while got < len(target):
            self.sock.settimeout(max(1e-3, until - time.monotonic()))
            count = self.sock.recv_into(target[got:])
            if not count:
                raise ConnectionError("the other end is closed")
            got += count


CIPHERS = (
    "cryptography.hazmat.primitives.ciphers.aead",
    "blocks between hosts",
    "split",
)
REFUSALS = "cryptography.exceptions", *CIPHERS[1:]


def _digest(content: Bytes | bytearray, about: bytes) -> bytes:
    digest = xxh3_128(about)
    digest.update(content)
    return digest.digest()


def is_same_user(sock: socket.socket) -> bool:
    """Tell whether the Unix-socket peer has our user id."""
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return False
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())
