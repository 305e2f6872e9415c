"""The borrower's end of a line: blocks of a lease are brought to their destinations.

They come as bytes, with requests sent ahead of the answers. Or they are copied out of the lender's
pool, which this process maps if both belong to one user of one host. After such a copy it asks
which of the blocks were still lent: a copy that another prompt may have overwritten is thrown away.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..base.step import PoolShape
from ..base.tiers import KEY_BYTES
from . import split_wire as wire
from .block_line import BlockLine, is_same_user
from .kv_tensors import PoolMemory, allocate_kv
from .places import Places, places_of

FETCH_SECONDS = 2.0
"""Seconds to wait for the blocks of one request."""
AHEAD = 32
"""Requests in flight. The connection never waits for this end; nor does this end, with all its
requests, wait for the other."""


class Wanted(NamedTuple):
    at: int
    """Place in the prompt."""
    key: bytes
    block: int
    """Destination block."""
    there: int
    """Block in the lender's pool."""


class Fetching:
    """One line's borrowing end. One thread at a time uses it."""

    def __init__(self, line: BlockLine, pool: list[Places] | None) -> None:
        """Use a line; `pool` is the lender's, by group, if it is mapped."""
        self._line, self.pool = line, pool

    def bring(
        self,
        ticket: int,
        group: int,
        wanted: Sequence[Wanted],
        into: Places,
        ready: Callable[[], None],
    ) -> int:
        """Bring the wanted blocks; return how many of the first came. The others are no longer
        lent.

        `ready` returns when blocks may be written. Raises `OSError`; then, or if fewer came, the
        line is closed.
        """
        whole, came = False, 0
        try:
            do = self._fetched if self.pool is None else self._copied
            came = do(ticket, group, wanted, into, ready)
            whole = came == len(wanted)
            return came
        finally:
            if not whole:
                self.close()
                # They may hold anything, such as NaN.
                into.clear([one.block for one in wanted[came:]])

    def close(self) -> None:
        self._line.close()

    def _fetched(
        self,
        ticket: int,
        group: int,
        wanted: Sequence[Wanted],
        into: Places,
        ready: Callable[[], None],
    ) -> int:
        came, runs = 0, _runs(wanted, wire.run_blocks(into.nbytes, sealed=self._line.sealed))
        asked: list[bytes] = []
        for number, run in enumerate(runs):
            ahead = runs[len(asked) : number + AHEAD]
            asked += [self._ask(ticket, group, more) for more in ahead]
            ready()
            blocks = [one.block for one in run]
            count = _right(self._line.receive_blocks(into, blocks, asked[number]), run)
            came += count
            if count < len(run):
                break
        return came

    def _copied(
        self,
        ticket: int,
        group: int,
        wanted: Sequence[Wanted],
        into: Places,
        ready: Callable[[], None],
    ) -> int:
        assert self.pool is not None
        came, pool = 0, self.pool[group]
        for run in _runs(wanted, wire.run_blocks(into.nbytes, sealed=False)):
            if not all(0 <= one.there < pool.blocks for one in run):
                break
            ready()
            into.copy([one.block for one in run], pool, [one.there for one in run])
            question = self._ask(ticket, group, run, copied=True)
            count = _right(self._line.receive(len(run) * KEY_BYTES, question), run)
            came += count
            if count < len(run):
                break
        return came

    def _ask(
        self, ticket: int, group: int, run: Sequence[Wanted], *, copied: bool = False
    ) -> bytes:
        question = wire.pack(wire.Fetch(ticket, group, [one.at for one in run], copied))
        self._line.send(question)
        return question


def open_line(
    address: str, welcome: wire.Welcome, shape: PoolShape, pool: list[Places] | None
) -> Fetching:
    """Open a line to the prefill server at this address, by its local socket if possible. `shape`:
    the pool here; `pool`: the lender's, if another line has it. Raises `OSError`."""
    if welcome.near:
        try:
            return _opened(socket.AF_UNIX, f"\0{welcome.near}", welcome, shape, pool)
        except ConnectionError:
            pass  # Another host, or another network namespace.
    return _opened(*wire.lines_at(address), welcome, shape, pool)


def _opened(
    kind: int, where: object, welcome: wire.Welcome, shape: PoolShape, pool: list[Places] | None
) -> Fetching:
    sock = socket.socket(kind, socket.SOCK_STREAM)
    file = -1
    try:
        sock.settimeout(FETCH_SECONDS)
        sock.connect(where)  # type: ignore[arg-type]
        sock.sendall(welcome.number)
        line = BlockLine(sock, welcome.key, asks=True, seconds=FETCH_SECONDS)
        if kind != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            files = socket.recv_fds(sock, 1, 1)[1]
            file = files[0] if files else -1
        there = wire.to_pool(line.receive(wire.MOST_QUESTION))
        if file < 0 or not is_same_user(sock):
            return Fetching(line, None)
        return Fetching(line, pool or _mapped(file, there, shape))
    except BaseException:
        sock.close()
        raise
    finally:
        if file >= 0:
            os.close(file)


def _mapped(file: int, there: wire.PoolThere, shape: PoolShape) -> list[Places]:
    """Map the lender's pool, read-only. Raises `ConnectionError` if it is not as required."""
    if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ConnectionError("the file of the pool might be made shorter")
    if len(there.blocks) != len(shape.groups) or not all(0 < n < 1 << 31 for n in there.blocks):
        raise ConnectionError("the pool there has other groups")
    groups = zip(shape.groups, there.blocks, strict=True)
    theirs = replace(shape, groups=tuple(one._replace(blocks=count) for one, count in groups))
    try:
        memory = PoolMemory(file, there.at, reads=True)
        return places_of(allocate_kv(theirs, "cpu", host=True, memory=memory))
    except (ValueError, OverflowError) as error:
        raise ConnectionError(f"the pool there is not in its file: {error}") from None


def _runs(wanted: Sequence[Wanted], most: int) -> list[Sequence[Wanted]]:
    return [wanted[at : at + most] for at in range(0, len(wanted), most)]


def _right(names: memoryview, run: Sequence[Wanted]) -> int:
    """Count the first blocks that have the requested names."""
    for number, one in enumerate(run):
        if names[number * KEY_BYTES : (number + 1) * KEY_BYTES] != one.key:
            return number
    return len(run)
