"""A replica's reports of its cached prefixes and its load.

One long-lived connection per replica. Its reports are dropped when it ends, and start again with
the next connection. TCP guarantees order and completeness, so there are no gaps to detect.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import msgspec

from ..base.foreign import Undecodable, json_reader
from ..base.text_prefixes import PATH_TOLD
from ..engine.simulator.routing import PrefixAffinity
from .replica import Replica
from .upstream import ReplicaLost

log = logging.getLogger("headrace.route")

AGAIN_SECONDS = 1.0
"""Pause after a connection ended."""
OTHERS_SECONDS = 30.0
"""Pause after a server that reports nothing: another product, or a server that needs an operator's
key."""
SILENT_SECONDS = 60.0
"""Longest silence. Our servers send something, if only a comment, several times a minute."""
MOST_PREFIX_EVENT = 1 << 20
"""Maximum bytes of one event: 4,096 keys take 90 kB."""
MOST_TOLD = 1 << 22
"""Hashes that one connection may report as held and not as gone: 600 MB of this process."""


class _PrefixEvent(msgspec.Struct):
    held: list[int]
    gone: list[int]
    in_work: Annotated[int, msgspec.Meta(ge=0, le=2**31)]


_PREFIX_EVENT = json_reader(_PrefixEvent)


async def follow(replica: Replica, policy: PrefixAffinity, key: str = "") -> None:
    """Pass the replica's reports to the policy, for as long as the gateway runs.

    `key`: an operator's key of the replica, if it requires keys.
    """
    refused = 0
    await forget(replica, policy)  # This task may have been restarted after a fault.
    while True:
        status = 0
        try:
            status = await _listen(replica, policy, key)
        except (ReplicaLost, TimeoutError):
            pass
        finally:
            replica.others, replica.tells = 0, False
        await forget(replica, policy)
        if status not in (0, 200, refused):
            refused = status
            log.info(
                "the replica does not report what it holds",
                extra={"replica": replica.url, "status": status},
            )
        await asyncio.sleep(AGAIN_SECONDS if status in (0, 200) else OTHERS_SECONDS)


async def forget(replica: Replica, policy: PrefixAffinity) -> None:
    """Forget the replica's reports, in steps between which requests are served."""
    for _ in policy.forget(replica.number):
        await asyncio.sleep(0)


async def _listen(replica: Replica, policy: PrefixAffinity, key: str) -> int:
    """Read one connection to its end; return its HTTP status. Raises `ReplicaLost` and
    `TimeoutError`."""
    head = f"GET {PATH_TOLD} HTTP/1.1\r\nhost: ".encode() + replica.host
    if key:
        head += b"\r\nauthorization: Bearer " + key.encode()
    connection = await replica.ask(head + b"\r\n\r\n", seconds=SILENT_SECONDS)
    held = 0
    try:
        if connection.status != 200:
            return connection.status
        rest = b""
        while part := await connection.part():
            *events, rest = (rest + part).split(b"\n\n")
            if len(rest) > MOST_PREFIX_EVENT:
                raise ReplicaLost("the replica's event does not end")
            for event in events:
                _, found, data = event.partition(b"data: ")
                if not found:
                    continue
                report = _read(data)
                held += len(report.held) - len(report.gone)
                if held > MOST_TOLD:
                    raise ReplicaLost(f"the replica reports more than {MOST_TOLD} names")
                policy.told(replica.number, report.held, report.gone)
                replica.tells = True
                replica.others = max(0, report.in_work - replica.outstanding)
        return connection.status
    finally:
        connection.abort()
        replica.connections.give_back(connection)


def _read(data: bytes) -> _PrefixEvent:
    """Decode an event. Raises `ReplicaLost`."""
    try:
        return _PREFIX_EVENT(data)
    except Undecodable:
        raise ReplicaLost("the replica's event is damaged") from None
