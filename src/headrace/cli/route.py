"""`headrace route`: one address before several servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from ..base.errors import OptionError
from ..route.run import RouteOptions, route
from .flags import argument, flag, with_flags


@with_flags(RouteOptions, "options")
def command(
    servers: Annotated[
        list[str],
        argument(
            "Addresses: http://host:port …. Asked again and again: dns://name:port (every "
            "address of a name), srv://_http._tcp.name (SRV records), "
            "k8s://[namespace/]service[:port] (ready pods)."
        ),
    ],
    options: RouteOptions,
    key_file: Annotated[
        Path | None,
        flag(
            "File with an operator's key of servers that ask for keys, so that they tell what "
            "their caches hold; it also guards this gateway's /metrics and list of servers."
        ),
    ] = None,
) -> None:
    """Route requests to servers, ours or foreign ones: by prefix and load, past dead ones."""

    def announce(line: str) -> None:
        print(line, flush=True)

    sys.exit(route(servers, options, key_of(key_file), announce))


def key_of(file: Path | None) -> str:
    """Read the key from a file. Raises `OptionError`."""
    if file is None:
        return ""
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"key_file cannot be read: {error}", param="key_file") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise OptionError("key_file must hold one key", param="key_file")
    return key
