"""Host names under which this server answers.

A page whose own name is re-bound to this server's address (DNS rebinding) has the same origin for
its browser: only the name in `Host` differs. No browser sends keys by itself, so a server with keys
is safe. A server without keys answers only under names that no stranger can point at it. These are
addresses, names that public DNS does not have, its own, and those of the option `hosts`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..base.errors import HeadraceError, InvalidRequest, OptionError
from .refusal import refusal

PRIVATE = (".localhost", ".local", ".internal", ".svc", ".home.arpa", ".lan", ".test")
"""Endings of names that cannot be registered; nor can a name without a dot."""
_FETCHED = re.compile(
    r"\.?[a-z0-9_][a-z0-9._-]*(:\d{1,5})?|[0-9a-f:]*:[0-9a-f:.]+|\[[0-9a-f:.]+\](:\d{1,5})?"
)
_NAME = re.compile(r"\.?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


class HostNotAllowed(InvalidRequest):
    status = 421
    code = "host_not_allowed"


def read_hosts(text: str | None) -> frozenset[str]:
    """Return the names of the option `hosts`. Raises `OptionError` naming the wrong one."""
    found = frozenset(part for each in (text or "").split(",") if (part := each.strip().lower()))
    for name in sorted(found):
        if not _NAME.fullmatch(name):
            raise OptionError(
                f"hosts must list names such as api.example.com, or .example.com for all below "
                f"it, not {name[:100]!r}",
                param="hosts",
            )
    return found


def read_fetch_hosts(text: str | None) -> tuple[str, ...]:
    """Return the hosts of the option `fetch_hosts`, as `FetchAddress` takes them. Raises
    `OptionError` naming the wrong one."""
    found = tuple(name.strip().lower() for name in (text or "").split(",") if name.strip())
    for name in found:
        if not _FETCHED.fullmatch(name):
            raise OptionError(
                f"fetch_hosts: {name!r:.100} is no host; it must be a name, name:port or .name",
                param="fetch_hosts",
            )
    return found


class Hosts:
    """ASGI layer that refuses requests under a foreign host name."""

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str], refused: Callable[[HeadraceError], None]
    ) -> None:
        """Wrap `app`. `hosts`: names accepted in addition to the usual ones."""
        self._app = app
        self._hosts = hosts | {socket.gethostname().lower()}
        self._known: set[str] = set()
        """Accepted values of the header; bounded in number."""
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if host not in self._known:
                if not self._takes(host):
                    error = HostNotAllowed(
                        f"this server is not known as {host[:200]!r}; its operator can add names "
                        "with the option hosts"
                    )
                    self._refused(error)
                    await refusal(scope["path"], error)(scope, receive, send)
                    return
                if len(self._known) < 64:
                    self._known.add(host)
        await self._app(scope, receive, send)

    def _takes(self, host: str) -> bool:
        name = host.strip().lower()
        bare, colon, port = name.rpartition(":")
        if colon and port.isdigit():
            name = bare
        if name.startswith("[") and name.endswith("]"):
            name = name[1:-1]
        name = name.rstrip(".")
        if not name:
            return True  # HTTP/1.0, which no browser speaks.
        try:
            ipaddress.ip_address(name)
        except ValueError:
            pass
        else:
            return True
        if "." not in name or name.endswith(PRIVATE) or name in self._hosts:
            return True
        return name.endswith(tuple(each for each in self._hosts if each.startswith(".")))
