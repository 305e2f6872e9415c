"""Files behind http(s) addresses, fetched by a process of their own.

Only the hosts that the operator names are asked, and only at addresses that anybody can reach: what
a client writes must not make this server talk to its own network.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..base.errors import InvalidRequest
from .confined import OnChild, checked, memory_file, run_child

MOST_URL = 2_048
"""Characters of an address."""
FETCH_REFUSALS = {
    "address": "the address must be http(s)://host/…, without a user",
    "host": "the operator of this server lets nothing be fetched from that host (fetch_hosts)",
    "private": "the host has an address that is not public",
    "large": "the file has more bytes than are taken",
    "fetch": "the host gave no file",
    "time": "the host took too long to give the file",
    "lost": "the file cannot be fetched within the limits of memory and time",
}
"""Code from the child → clause for the user. Nothing that a host said is repeated."""
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits on one fetch."""

    redirects: int = 3
    """Redirections that are followed, each checked as the first address."""
    memory: int = 1 << 30
    """Bytes of address space of the child."""
    wall_seconds: float = 20.0
    """Time from the start of the child until it is killed."""


class FetchAddress:
    """A checked address: `host`, `port`, `secure` and `path`."""

    def __init__(self, url: str, hosts: Sequence[str]) -> None:
        """`hosts`: `name`, `name:port`, or `.name` for all names below it; `[IPv6]:port`. Raises
        `ValueError` with a key of `FETCH_REFUSALS`."""
        if len(url) > MOST_URL or not url.isascii() or any(sign <= " " for sign in url):
            raise ValueError("address")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise ValueError("address") from None
        if parts.scheme not in _PORTS or not host or "@" in parts.netloc or "%" in host:
            raise ValueError("address")  # A zone's id could end like a name.
        self.host, self.secure = host, parts.scheme == "https"
        self.port = port or _PORTS[parts.scheme]
        usual = self.port == _PORTS[parts.scheme]
        self.literal = is_address(host)
        """Whether the operator named this very address, which then need not be public."""
        self.shown = f"[{host}]" if ":" in host else host
        """The host as an address and a header have it."""
        spelt = {f"{self.shown}:{self.port}", *([host, self.shown] if usual else [])}
        below = usual and not self.literal
        if not any(
            name in spelt or (below and name[:1] == "." and host.endswith(name)) for name in hosts
        ):
            raise ValueError("host")
        self.path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def is_address(host: str) -> bool:
    """Tell whether a host is written as an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_public(address: str) -> bool:
    """Tell whether an address, or the one that is wrapped in it, is everybody's."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found in _NAT64 or found.ipv4_mapped is not None:
            return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
        inner = found.sixtofour
        # ipaddress takes more for global, among them IPv4-compatible and site-local addresses.
        if found not in _UNICAST or found.teredo is not None:
            return False
        if inner is not None and not inner.is_global:
            return False
    return found.is_global and not found.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")


def fetch(
    url: str,
    hosts: Sequence[str],
    most: int,
    param: str = "url",
    limits: FetchLimits = FetchLimits(),
    on_child: OnChild | None = None,
) -> bytes:
    """Fetch a file of at most `most` bytes from one of `hosts`.

    `param`, `on_child`: see `decode_picture`. Blocks until the file is there: call it in a thread.
    Raises `InvalidRequest`.
    """
    try:
        FetchAddress(url, hosts)
    except ValueError as refused:
        raise InvalidRequest(FETCH_REFUSALS[str(refused)], param=param) from None
    order = {
        "url": url,
        "hosts": list(hosts),
        "redirects": limits.redirects,
        "seconds": limits.wall_seconds,
        "memory": limits.memory,
        "result": most,
    }
    with memory_file("nothing") as source, memory_file("fetched") as target:
        answer = run_child("fetch_child", order, source, target, limits.wall_seconds, on_child)
        size = os.fstat(target.fileno()).st_size
        found = checked(answer, FETCH_REFUSALS, lambda one: one.get("bytes") == size <= most)
        if "bytes" not in found:
            why = found.get("refused", "lost")
            raise InvalidRequest(FETCH_REFUSALS[why], param=param)
        return os.pread(target.fileno(), size, 0)
