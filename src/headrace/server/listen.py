"""uvicorn as the server runs it: with its own protocol class; signals are handled in `run`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import uvicorn
from starlette.types import ASGIApp

from .meter import HttpMeter
from .protocol import SOCKET_BYTES, BoundedProtocol, most_connections
from .tls import Tls


class Listener(uvicorn.Server):
    """uvicorn without signal handlers of its own: `run` decides what a signal means."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(
    app: ASGIApp,
    tls: Tls | None,
    counted: HttpMeter | None,
    *,
    backlog: int,
    last_words: float,
    websockets: bool = False,
) -> Listener:
    """Create a server of `app`, whose sockets are passed later.

    `counted`: meter of the connections that end at a limit. `last_words`: seconds that answers have
    to end when the server stops. `websockets`: whether they are served, if their library is
    installed.
    """

    class Bounded(BoundedProtocol):
        max_connections = min(BoundedProtocol.max_connections, most_connections())
        meter = counted

    config = uvicorn.Config(
        app,
        loop="none",
        http=Bounded,
        ws=(websockets and _sockets(counted)) or "none",
        ws_max_size=SOCKET_BYTES,
        ws_per_message_deflate=False,  # Compressed messages could unpack beyond the limit.
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # Otherwise any local client could claim another address.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(last_words),
        backlog=backlog,
    )
    if tls is not None:
        context = tls.context
        config.load()
        config.ssl = context
    return Listener(config)


def _sockets(counted: HttpMeter | None) -> type[asyncio.Protocol] | None:
    """Return the websocket protocol, or None if its library is not installed (extra `audio`)."""
    if find_spec("websockets") is None:
        return None
    from .socket_protocol import BoundedSocket  # Local: 30 ms of imports for live transcription.

    class Counted(BoundedSocket):
        meter = counted

    return Counted
