"""The gateway's process: port, probes, signals, shutdown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from ..base.errors import OptionError
from ..base.systemd import notify
from ..engine.simulator.routing import ROUTERS
from ..server.hosts import read_hosts
from ..server.listen import http_server
from ..server.origin import read_origins
from ..server.run import loop_factory, take_port
from .asked import MAX_BODY
from .gateway import ANSWER_SECONDS, Gateway
from .picker import Picker
from .replica import replicas_of
from .roster import Roster, read_servers

BACKLOG = 2048


def route(
    servers: Sequence[str],
    *,
    host: str,
    port: int,
    policy: str = "prefix",
    migrate: bool = True,
    max_body: int = MAX_BODY,
    answer_seconds: float = ANSWER_SECONDS,
    drain_seconds: float = 30.0,
    key: str = "",
    hosts: str = "",
    cors_origins: str = "",
    endpoint_picker: str = "",
    endpoint_picker_tls: Path | None = None,
    endpoint_picker_clients: Path | None = None,
    announce: Callable[[str], None] = print,
) -> int:
    """Serve until a signal; return the exit status.

    On the first signal the port closes and requests in work get `drain_seconds` to end; a second
    signal ends them at once. `endpoint_picker`: HOST:PORT on which other gateways may ask for a
    request's endpoint (`picker`). The other options are those of `Gateway`. Raises `OptionError`
    and `PackageAbsent`.
    """
    if policy not in ROUTERS:
        raise OptionError(
            f"policy must be one of {', '.join(ROUTERS)}, not {policy!r}", param="policy"
        )
    fixed, sources = read_servers(servers)
    replicas = replicas_of(fixed)
    router = ROUTERS[policy]()
    gateway = Gateway(
        replicas,
        router,
        migrate=migrate,
        max_body=max_body,
        answer_seconds=answer_seconds,
        key=key,
        hosts=read_hosts(hosts),
        origins=read_origins(cors_origins),
    )
    picker = Picker(gateway) if endpoint_picker else None
    listener = take_port(host, port)

    async def serve() -> int:
        server = http_server(
            gateway, None, gateway.meter, backlog=BACKLOG, last_words=drain_seconds
        )
        loop, tasks = asyncio.get_running_loop(), gateway.tasks
        stops: list[asyncio.Task[None]] = []

        def signalled() -> None:
            if picker is not None:
                seconds = 0.0 if gateway.draining else drain_seconds
                stops.append(tasks.errand("picker", picker.stop(seconds)))
            server.force_exit = gateway.draining
            gateway.draining = server.should_exit = True
            notify("STOPPING=1")

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled)
        gateway.loop.start()
        roster = Roster(gateway, router, sources, key)
        roster.start()
        try:
            if picker is not None:
                await picker.start(endpoint_picker, endpoint_picker_tls, endpoint_picker_clients)
                announce(f"endpoints are picked on port {picker.port}")
            name, taken = listener.getsockname()[:2]
            named = "".join(f" and {one.name}" for one in sources)
            announce(f"ready: {len(replicas)} servers{named} by {policy} on http://{name}:{taken}")
            notify("READY=1")
            await server.serve(sockets=[listener])
            await asyncio.gather(*stops)
        finally:
            roster.stop()
            gateway.close()
        return 0

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve())
    finally:
        listener.close()
