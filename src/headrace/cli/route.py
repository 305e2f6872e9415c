"""`headrace route`: one address before several servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import OptionError
from ..engine.routing import ROUTERS
from ..route.gateway import MAX_BODY
from ..route.run import route


def command(
    servers: Annotated[list[str], typer.Argument(help="Addresses: http://host:port …")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    policy: Annotated[str, typer.Option(help=", ".join(ROUTERS))] = "prefix",
    migrate: Annotated[
        bool, typer.Option(help="Streams of a dead server go on at another one.")
    ] = True,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of a request's body.")] = MAX_BODY,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with an operator's key of servers that ask for keys, so that they tell what "
            "their caches hold."
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
        typer.Option(help="Folder with tls.crt and tls.key; without it that port has no TLS."),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="For what runs, after the first signal.")
    ] = 30.0,
) -> None:
    """Route requests to servers, ours or another's: by prefix and load, past those that died."""

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
            drain_seconds=drain_seconds,
            key=key_of(key_file),
            endpoint_picker=endpoint_picker,
            endpoint_picker_tls=endpoint_picker_tls,
            announce=announce,
        )
    )


def key_of(file: Path | None) -> str:
    """The key that a file holds; raises `OptionError`."""
    if file is None:
        return ""
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"key_file cannot be read: {error}", param="key_file") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OptionError("key_file must hold one key", param="key_file")
    return key
