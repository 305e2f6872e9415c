"""The gateway's process: port, probes, signals, and the end of what runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence

from ..base.errors import OptionError
from ..engine.routing import ROUTERS, PrefixAffinity
from ..server.listen import Listener, http_server
from ..server.run import loop_factory, take_port
from .gateway import MAX_BODY, Gateway
from .holdings import follow
from .replica import replicas_of

BACKLOG = 2048


def route(
    servers: Sequence[str],
    *,
    host: str,
    port: int,
    policy: str = "prefix",
    migrate: bool = True,
    max_body: int = MAX_BODY,
    drain_seconds: float = 30.0,
    key: str = "",
    announce: Callable[[str], None] = print,
) -> int:
    """Serve until a signal; returns the exit status.

    On the first signal the port closes and what runs has `drain_seconds` to end; a second one ends
    it at once. `key`: an operator's key of the servers, where they ask for keys and are to tell
    what their caches hold. Raises `OptionError`.
    """
    if policy not in ROUTERS:
        raise OptionError(
            f"policy must be one of {', '.join(ROUTERS)}, not {policy!r}", param="policy"
        )
    replicas = replicas_of(servers)
    router = ROUTERS[policy]()
    gateway = Gateway(replicas, router, migrate=migrate, max_body=max_body)
    listener = take_port(host, port)

    async def serve() -> int:
        server = http_server(gateway, None, None, backlog=BACKLOG, last_words=drain_seconds)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _signalled, gateway, server)
        watching = [asyncio.ensure_future(one.watch()) for one in replicas]
        if isinstance(router, PrefixAffinity):
            watching += [asyncio.ensure_future(follow(one, router, key)) for one in replicas]
        name, taken = listener.getsockname()[:2]
        announce(f"ready: {len(replicas)} servers by {policy} on http://{name}:{taken}")
        try:
            await server.serve(sockets=[listener])
        finally:
            for one in watching:
                one.cancel()
            for replica in replicas:
                replica.connections.abort()
        return 0

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve())
    finally:
        listener.close()


def _signalled(gateway: Gateway, server: Listener) -> None:
    if gateway.draining:
        server.force_exit = True
    gateway.draining = True
    server.should_exit = True
