"""`headrace clients`: settings of a running server for other programs, to paste."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import typer

from ..base.errors import InvalidRequest, Unreachable
from ..base.names import nearest
from ..base.sections import read_sections
from .flags import argument, flag
from .remote import API_KEY, HERE, Url, named, unreachable

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

KEY = "YOUR_KEY"
CLIENTS = {
    name: (title, settings)
    for name, title, settings in read_sections(Path(__file__).with_suffix(".txt"))
}
"""Name → (title, settings)."""


@command.command()
def clients(
    name: Annotated[str | None, argument(f"One of {', '.join(CLIENTS)}; none: all.")] = None,
    url: Url = None,
    api_key: Annotated[
        str | None, flag("API key, if the server wants one.", *API_KEY, envvar="HEADRACE_API_KEY")
    ] = None,
) -> None:
    """Print the settings with which other programs use a running server, with its own names.

    A key is not printed: YOUR_KEY stands for it.
    """
    if name is not None and name not in CLIENTS:
        raise InvalidRequest(
            f"{name!r:.60} is not known; one of {', '.join(CLIENTS)}{nearest(name, CLIENTS)}",
            param="name",
        )
    base = named(None, url, HERE).rstrip("/").removesuffix("/v1")
    model, context = _asked(base, api_key)
    parts = urlsplit(base)
    local = parts.hostname in ("127.0.0.1", "localhost", "::1")
    words = {
        "url": base,
        "model": model,
        "context": context,
        "key": KEY if api_key else "none",
        # Inside a container, loopback is the container's own.
        "reached": f"{parts.scheme}://host.docker.internal:{parts.port or 80}" if local else base,
    }
    for each in CLIENTS if name is None else [name]:
        title, settings = CLIENTS[each]
        if name is None:
            print(f"# {title}")
        print(Template(settings).substitute(words))
        if each == "open-webui" and local:
            print("# in a container, with --add-host=host.docker.internal:host-gateway; the server")
            print(
                "# then needs headrace serve --host 0.0.0.0, with --keys; elsewhere the address is"
            )
            print(f"# {base}/v1")
        if name is None:
            print()


def _asked(base: str, api_key: str | None) -> tuple[str, int]:
    """Return the name and the context length of the server's first model. Raises `Unreachable`."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(f"{base}/v1/models", headers=headers, timeout=30)
        first = reply.raise_for_status().json()["data"][0]
        return str(first["id"]), int(first.get("max_model_len") or 4096)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        more = ": it wants an --api-key" if status == 401 else ""
        raise Unreachable(f"{base} answers /v1/models with {status}{more}") from None
    except httpx.HTTPError as error:
        raise unreachable(base, error) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Unreachable(f"{base} is no server with OpenAI's routes") from None
