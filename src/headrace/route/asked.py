"""A request as the gateway reads it, and as it is sent to replicas."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers as HeaderView
from starlette.types import Scope

from ..base.config import ServerOptions
from ..base.errors import TooLarge
from ..base.foreign import Undecodable, json_reader
from ..base.text_prefixes import NOTHING, PATHS, TextPrefixes, text_prefixes
from ..base.weight import LIGHT, weigh
from ..media import AudioLimits
from ..server.body import MOST
from ..server.hearing.form import MOST_BESIDE
from .replica import Replica
from .upstream import Headers

GENERATING = ("/v1/chat/completions", "/v1/completions")
"""Routes whose streams are migrated."""
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Routes whose bodies are forms with a sound file."""
ROUTED = {
    **dict.fromkeys(GENERATING, "POST"),
    "/v1/messages": "POST",
    "/v1/embeddings": "POST",
    "/v1/rerank": "POST",
    "/v1/score": "POST",
    **dict.fromkeys(FORMS, "POST"),
    "/v1/audio/speech": "POST",
    "/v1/models": "GET",
}
"""Routes that every replica answers alike, with their method."""
HEALTH = ("/health", "/v1/health/ready", "/v1/health/live")
MAX_BODY = ServerOptions().max_body
"""Bytes of a body that is not a form; our servers refuse larger ones by default."""
MOST_FORM = AudioLimits().bytes + MOST_BESIDE
"""Minimum limit on the bytes of a form."""
MOST_READ = 4 * 2**20
"""Bytes of a body that is parsed for its prompt: the parser holds the interpreter lock."""
_OWN = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"http2-settings", b"proxy-authorization", b"expect",
})  # fmt: skip
"""Hop-by-hop headers, which are not forwarded (RFC 9110, 7.6.1)."""

_LEFT_OUT = _OWN | {
    b"host", b"content-length", b"x-request-id", b"x-forwarded-host", b"x-forwarded-for",
    b"origin", b"sec-fetch-site",
}  # fmt: skip
"""Headers of a request that are rewritten or dropped. The last two are judged here (`Origins`): a
replica would compare them with its own name."""


class Switches(msgspec.Struct):
    """Body fields that decide about a migration."""

    seed: int | None = None
    stream: bool | None = None


_switches = json_reader(Switches)


def looked(path: str, body: bytes | bytearray, secret: bytes) -> tuple[TextPrefixes, Switches]:
    """Read from a body its prompt's prefix hashes and the fields that decide about a migration.

    A body that is very large, too costly to parse for our servers, or invalid is passed on unread:
    the replica reports the error.
    """
    names, read = NOTHING, Switches()
    if len(body) > MOST_READ:
        return names, read
    if len(body) > LIGHT:
        try:
            weigh(body).verify(MOST, "the body")
        except TooLarge:
            return names, read
    if path in PATHS:
        names = text_prefixes(body, secret)
    if path in GENERATING:
        with suppress(Undecodable):
            read = _switches(body)
    return names, read


def of_connection(headers: Headers) -> frozenset[bytes]:
    """List the headers that are not forwarded: hop-by-hop ones and those named in `Connection`."""
    named = [value for name, value in headers if name == b"connection"]
    return _OWN | {one.strip().lower() for value in named for one in value.split(b",")}


def owner_of(scope: Scope) -> str:
    """Identify the client for its share of the bounded resources: its address, or the /64 of an
    IPv6 address."""
    host = (scope.get("client") or ("", 0))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return str(host)
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped or ipaddress.ip_network((address, 64), strict=False))
    return str(address)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is sent to replicas."""

    path: str
    head: bytes
    """First line and headers, without the host's."""
    body: bytearray
    prefixes: Sequence[int]
    """Prefix hashes of its prompt."""
    migrates: bool

    def to(self, replica: Replica) -> bytes:
        """Return the head for a replica."""
        size = len(self.body)
        return b"%bhost: %b\r\ncontent-length: %d\r\n\r\n" % (self.head, replica.host, size)


def head_of(scope: Scope) -> bytes:
    """Write a request's head for a replica, without host and size."""
    given: Headers = scope["headers"]
    path = scope["path"].encode()
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), path + query)]
    left_out = _LEFT_OUT | of_connection(given)
    lines += [b"%b: %b" % pair for pair in given if pair[0] not in left_out]
    view = HeaderView(raw=given)
    came = [view.get("x-forwarded-for", ""), (scope.get("client") or ("", 0))[0]]
    for name, value in (
        ("x-request-id", scope.get("headrace.request_id", "")),
        ("x-forwarded-for", ", ".join(filter(None, came))),
        ("x-forwarded-host", view.get("x-forwarded-host") or view.get("host", "")),
    ):
        if value:
            lines.append(f"{name}: {value}".encode("latin-1"))
    return b"\r\n".join(lines) + b"\r\n"
