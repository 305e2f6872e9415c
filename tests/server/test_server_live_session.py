"""A live session and the socket that it tells its words to."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from headrace.base.config import ServerOptions
from headrace.server.service import Service
from headrace.server.socket import Socket

pytest.importorskip("soxr", reason="needs the extra audio")
from headrace.server.hearing.live import LiveSession


async def test_nothing_is_done_for_a_client_that_has_gone() -> None:
    """Events that it sent before it left wait in the queue: none of them is answered."""
    socket, told = Socket([]), 0

    async def send(message: Any) -> None:
        nonlocal told
        told += 1
        socket.lost = told > 3  # As `Sockets` has it, once the connection says so.

    events: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(200):
        events.put_nowait({"type": "websocket.receive", "text": "no event"})
    events.put_nowait({"type": "http.disconnect"})
    session = LiveSession(Service(ServerOptions()), cast(Any, None), None, send, beta=False)
    await session.run(events.get, socket)
    assert told == 4
    assert events.qsize() > 190
