"""What a replica's cache holds and how much it has to do, as it tells a router that listens.

One connection a replica, for as long as it lasts: what it told ends with it, and begins anew with
the next. Order and completeness are TCP's, so there is no gap to look for.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from ..base.foreign import Undecodable, json_reader
from ..base.text_prefixes import PATH_TOLD
from ..engine.routing import PrefixAffinity
from .replica import Replica
from .upstream import ReplicaLost

log = logging.getLogger("headrace.route")

AGAIN_SECONDS = 1.0
"""After a connection that ended."""
OTHERS_SECONDS = 30.0
"""After a server that tells nothing: another's, or one that wants an operator's key."""
SILENT_SECONDS = 60.0
"""Our servers say something, if only a comment, several times a minute."""
MOST_PREFIX_EVENT = 1 << 20
"""Bytes of one event: 4,096 keys are 90 kB."""


class _PrefixEvent(msgspec.Struct):
    held: list[int]
    gone: list[int]
    in_work: int


_PREFIX_EVENT = json_reader(_PrefixEvent)


async def follow(replica: Replica, policy: PrefixAffinity, key: str = "") -> None:
    """Tell the policy what the replica tells, for as long as the gateway runs. `key`: an operator's
    key of the replica's, where it asks for keys."""
    refused = 0
    while True:
        status = 0
        try:
            status = await _listen(replica, policy, key)
        except (ReplicaLost, TimeoutError, Undecodable):
            pass
        finally:
            policy.silent(replica.number)
            replica.others, replica.tells = 0, False
        if status not in (0, 200, refused):
            refused = status
            log.info(
                "the replica does not tell what it holds",
                extra={"replica": replica.url, "status": status},
            )
        await asyncio.sleep(AGAIN_SECONDS if status in (0, 200) else OTHERS_SECONDS)


async def _listen(replica: Replica, policy: PrefixAffinity, key: str) -> int:
    """One connection, to its end; returns the status of its answer. Raises `ReplicaLost`,
    `TimeoutError` and what msgspec raises for what is no event."""
    head = f"GET {PATH_TOLD} HTTP/1.1\r\nhost: ".encode() + replica.host
    if key:
        head += b"\r\nauthorization: Bearer " + key.encode()
    connection = await replica.ask(head + b"\r\n\r\n")
    try:
        if connection.status != 200:
            return connection.status
        rest = b""
        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                part = await connection.part()
            if not part:
                return connection.status
            *events, rest = (rest + part).split(b"\n\n")
            if len(rest) > MOST_PREFIX_EVENT:
                raise ReplicaLost("the replica's event does not end")
            for event in events:
                _, found, data = event.partition(b"data: ")
                if found:
                    told = _PREFIX_EVENT(data)
                    policy.told(replica.number, told.held, told.gone)
                    replica.tells = True
                    replica.others = max(0, told.in_work - replica.outstanding)
    finally:
        connection.abort()
        replica.connections.give_back(connection)
