"""`headrace route`: one address before several servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from ..base.errors import OptionError
from ..engine.simulator.routing import ROUTERS
from ..route.asked import MAX_BODY
from ..route.gateway import ANSWER_SECONDS
from ..route.run import route
from .flags import argument, flag


def command(
    servers: Annotated[
        list[str],
        argument(
            "Addresses: http://host:port …. Asked again and again: dns://name:port (every "
            "address of a name), srv://_http._tcp.name (SRV records), "
            "k8s://[namespace/]service[:port] (ready pods)."
        ),
    ],
    host: Annotated[str, flag("Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, flag("0 takes a free one.", min=0, max=65535)] = 8080,
    policy: Annotated[str, flag(", ".join(ROUTERS))] = "prefix",
    migrate: Annotated[bool, flag("Streams of a dead server go on at another one.")] = True,
    max_body: Annotated[
        int, flag("Bytes of a request's body, as the servers' own --max-body.", min=1024)
    ] = MAX_BODY,
    answer_seconds: Annotated[
        float,
        flag("A server that says nothing for so long, before or within an answer, is left.", min=1),
    ] = ANSWER_SECONDS,
    hosts: Annotated[
        str,
        flag(
            "Names under which this gateway is reached beside addresses and local names, as "
            "in api.example.com,.example.org; without --key-file it answers under no others."
        ),
    ] = "",
    cors_origins: Annotated[
        str,
        flag(
            "Origins whose web pages may use this gateway, as in "
            "https://a.example,https://b.example; none: only pages of its own origin."
        ),
    ] = "",
    key_file: Annotated[
        Path | None,
        flag(
            "File with an operator's key of servers that ask for keys, so that they tell what "
            "their caches hold; it also guards this gateway's /metrics and list of servers."
        ),
    ] = None,
    endpoint_picker: Annotated[
        str,
        flag(
            "Tell other gateways where a request is to go: the endpoint picker protocol of "
            "Kubernetes (Envoy's external processing, gRPC).",
            metavar="HOST:PORT",
        ),
    ] = "",
    endpoint_picker_tls: Annotated[
        Path | None,
        flag(
            "Folder with tls.crt and tls.key, read again when they change; without it that "
            "port has no TLS."
        ),
    ] = None,
    endpoint_picker_clients: Annotated[
        Path | None,
        flag("CA (PEM) that certificates of the gateways that ask must come from: mutual TLS."),
    ] = None,
    drain_seconds: Annotated[float, flag("For what runs, after the first signal.", min=0)] = 30.0,
) -> None:
    """Route requests to servers, ours or foreign ones: by prefix and load, past dead ones."""

    def announce(line: str) -> None:
        print(line, flush=True)

    sys.exit(
        route(
            servers,
            host=host,
            port=port,
            policy=policy,
            migrate=migrate,
            max_body=max_body,
            answer_seconds=answer_seconds,
            hosts=hosts,
            cors_origins=cors_origins,
            drain_seconds=drain_seconds,
            key=key_of(key_file),
            endpoint_picker=endpoint_picker,
            endpoint_picker_tls=endpoint_picker_tls,
            endpoint_picker_clients=endpoint_picker_clients,
            announce=announce,
        )
    )


def key_of(file: Path | None) -> str:
    """Read the key that a file holds. Raises `OptionError`."""
    if file is None:
        return ""
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"key_file cannot be read: {error}", param="key_file") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OptionError("key_file must hold one key", param="key_file")
    return key
