"""`headrace route`: one address before several servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import OptionError
from ..engine.simulator.routing import ROUTERS
from ..route.asked import MAX_BODY
from ..route.gateway import ANSWER_SECONDS
from ..route.run import route


def command(
    servers: Annotated[
        list[str],
        typer.Argument(
            help="Addresses: http://host:port …. Asked again and again: dns://name:port (every "
            "address of a name), srv://_http._tcp.name (SRV records), "
            "k8s://[namespace/]service[:port] (ready pods)."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    policy: Annotated[str, typer.Option(help=", ".join(ROUTERS))] = "prefix",
    migrate: Annotated[
        bool, typer.Option(help="Streams of a dead server go on at another one.")
    ] = True,
    max_body: Annotated[
        int,
        typer.Option(min=1024, help="Bytes of a request's body, as the servers' own --max-body."),
    ] = MAX_BODY,
    answer_seconds: Annotated[
        float,
        typer.Option(
            min=1,
            help="A server that says nothing for so long, before or within an answer, is left.",
        ),
    ] = ANSWER_SECONDS,
    hosts: Annotated[
        str,
        typer.Option(
            help="Names under which this gateway is reached beside addresses and local names, as "
            "in api.example.com,.example.org; without --key-file it answers under no others."
        ),
    ] = "",
    cors_origins: Annotated[
        str,
        typer.Option(
            help="Origins whose web pages may use this gateway, as in "
            "https://a.example,https://b.example; none: only pages of its own origin."
        ),
    ] = "",
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with an operator's key of servers that ask for keys, so that they tell what "
            "their caches hold; it also guards this gateway's /metrics and list of servers."
        ),
    ] = None,
    endpoint_picker: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Tell other gateways where a request is to go: the endpoint picker protocol of "
            "Kubernetes (Envoy's external processing, gRPC).",
        ),
    ] = "",
    endpoint_picker_tls: Annotated[
        Path | None,
        typer.Option(
            help="Folder with tls.crt and tls.key, read again when they change; without it that "
            "port has no TLS."
        ),
    ] = None,
    endpoint_picker_clients: Annotated[
        Path | None,
        typer.Option(
            help="CA (PEM) that certificates of the gateways that ask must come from: mutual TLS."
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="For what runs, after the first signal.")
    ] = 30.0,
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
