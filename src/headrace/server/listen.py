"""uvicorn as the server runs it: its own protocol below, its signals left to `run`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from .meter import HttpMeter
from .protocol import BoundedProtocol, most_connections
from .tls import Tls


class Listener(uvicorn.Server):
    """uvicorn without signal handlers of its own: what a signal means is decided in `run`."""

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
) -> Listener:
    """A server of `app`, to be given its sockets. `counted`: what counts the connections that end
    at a bound. `last_words`: seconds that answers have to end when it stops."""

    class Bounded(BoundedProtocol):
        max_connections = min(BoundedProtocol.max_connections, most_connections())
        meter = counted

    config = uvicorn.Config(
        app,
        loop="none",
        http=Bounded,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(last_words),
        backlog=backlog,
    )
    if tls is not None:
        context = tls.context
        config.load()
        config.ssl = context
    return Listener(config)
