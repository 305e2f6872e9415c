"""The gateway's process: port, probes, signals, shutdown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.config import option
from ..base.errors import OptionError, one_of
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
from .roster import Membership, read_servers

BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Options of the gateway in addition to its servers."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8080, "0 takes a free one.", min=0, max=65535)
    policy: str = option("prefix", ", ".join(ROUTERS))
    migrate: bool = option(True, "Continue the streams of a dead server on another one.")
    max_body: int = option(
        MAX_BODY, "Bytes of a request's body, as the servers' own --max-body.", min=1024
    )
    answer_seconds: float = option(
        ANSWER_SECONDS,
        "Maximum silence of a server, before or within an answer, in seconds.",
        min=1,
    )
    hosts: str = option(
        "",
        "Names under which this gateway is reached besides addresses and local names, as in "
        "api.example.com,.example.org; without --key-file it answers under no others.",
    )
    cors_origins: str = option(
        "",
        "Origins whose web pages may use this gateway, as in "
        "https://a.example,https://b.example; none: only pages of its own origin.",
    )
    endpoint_picker: str = option(
        "",
        "Answer other gateways which server gets a request: the endpoint picker protocol of "
        "Kubernetes (Envoy's external processing, gRPC).",
        metavar="HOST:PORT",
    )
    endpoint_picker_tls: Path | None = option(
        None,
        "Folder with tls.crt and tls.key, read again when they change; without it that port has "
        "no TLS.",
    )
    endpoint_picker_clients: Path | None = option(
        None, "CA (PEM) that certificates of the gateways that ask must come from: mutual TLS."
    )
    drain_seconds: float = option(30.0, "Seconds for requests in work, after a signal.", min=0)


def route(
    servers: Sequence[str], options: RouteOptions, key: str, announce: Callable[[str], None]
) -> int:
    """Serve until a signal; return the exit status. `key`: an operator's key of the servers.

    On the first signal the port closes and requests in work get `drain_seconds` to end; a second
    signal ends them at once. Raises `OptionError` and `PackageAbsent`.
    """
    policy = options.policy
    one_of(policy, ROUTERS, "policy", OptionError)
    fixed, sources = read_servers(servers)
    replicas = replicas_of(fixed)
    router = ROUTERS[policy]()
    gateway = Gateway(
        replicas,
        router,
        migrate=options.migrate,
        max_body=options.max_body,
        answer_seconds=options.answer_seconds,
        key=key,
        hosts=read_hosts(options.hosts),
        origins=read_origins(options.cors_origins),
    )
    picker = Picker(gateway) if options.endpoint_picker else None
    listener = take_port(options.host, options.port)

    async def serve() -> int:
        server = http_server(
            gateway, None, gateway.meter, backlog=BACKLOG, last_words=options.drain_seconds
        )
        loop, tasks = asyncio.get_running_loop(), gateway.tasks
        stops: list[asyncio.Task[None]] = []

        def signalled() -> None:
            if picker is not None:
                seconds = 0.0 if gateway.draining else options.drain_seconds
                stops.append(tasks.errand("picker", picker.stop(seconds)))
            server.force_exit = gateway.draining
            gateway.draining = server.should_exit = True
            notify("STOPPING=1")

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled)
        gateway.loop.start()
        roster = Membership(gateway, router, sources, key)
        roster.start()
        try:
            if picker is not None:
                await picker.start(
                    options.endpoint_picker,
                    options.endpoint_picker_tls,
                    options.endpoint_picker_clients,
                )
                announce(f"endpoints are picked on port {picker.port}")
            name, taken = listener.getsockname()[:2]
            named = "".join(f" and {one.name}" for one in sources)
            count = f"{len(replicas)} server{'s' * (len(replicas) != 1)}"
            announce(f"ready: {count}{named} by {policy} on http://{name}:{taken}")
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
