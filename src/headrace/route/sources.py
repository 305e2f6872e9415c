"""Sources of replicas: DNS names and Kubernetes services, queried periodically.

A source reports its whole list of addresses whenever it changes. While it cannot be queried, the
last list stays, so a failed resolver does not remove servers that answer their probes. Its answers
are not trusted: addresses are parsed and bounded, and those that no server can have are left out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from ..base.errors import OptionError
from ..base.extras import needed

log = logging.getLogger("headrace.route")

MOST_SERVERS = 1024
"""Replicas of one gateway that sources may name; further ones are left out."""
RESOLVE_SECONDS = 5.0
"""Seconds between two queries for a name."""
ABSENCES = 3
"""Consecutive answers without an address before it leaves: some resolvers list only a few."""
LOOKUP_SECONDS = 5.0
"""Maximum seconds of a lookup of SRV records."""
NOWHERE = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
"""Resolver errors which mean that the name has no address, not that the lookup failed."""
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_NUMBER = re.compile(r"(^|\.)(\d+|0x[0-9a-f]*)\.?$")
"""End of a name that the resolver reads as an IPv4 address, in one of its spellings."""
_NAMED = re.compile(r"dns://(?P<host>[^/:@\s]+):(?P<port>\d{1,5})/?")
_SERVICE = re.compile(r"srv://(?P<host>[^/:@\s]+)/?")

Found = Callable[[Sequence[str]], None]
Lookup = Callable[[], Awaitable[list[str]]]


class ServerSource(Protocol):
    """A source of replicas that may come and go."""

    name: str
    """The source as the user wrote it."""
    problem: str
    """Reason why it cannot be queried now; empty if it can."""

    async def watch(self, found: Found) -> None:
        """Call `found` with all its addresses (URLs) whenever they may have changed; never end."""


class Unresolved(Exception):
    """Failure: the addresses of a name could not be found out."""


class DnsName:
    """A name in DNS, by its addresses (`dns://`) or its SRV records (`srv://`)."""

    def __init__(self, name: str, lookup: Lookup) -> None:
        """Create the source. `lookup`: async; returns the current URLs; raises `Unresolved`."""
        self.name, self.problem = name, ""
        self._lookup = lookup
        self._absent: dict[str, int] = {}
        """Address → consecutive answers without it."""

    async def watch(self, found: Found) -> None:
        while True:
            try:
                urls = await self._lookup()
            except Unresolved as error:
                note(self, str(error))
            else:
                note(self, "" if urls else "the name has no address")
                found(self._settled(urls))
            await asyncio.sleep(RESOLVE_SECONDS)

    def _settled(self, urls: Iterable[str]) -> list[str]:
        """Return these addresses and those of the last answers."""
        current = dict.fromkeys(urls)
        absent = {
            url: answers + 1
            for url, answers in self._absent.items()
            if url not in current and answers + 1 < ABSENCES
        }
        self._absent = dict(list((dict.fromkeys(current, 0) | absent).items())[:MOST_SERVERS])
        return list(self._absent)


def note(source: ServerSource, problem: str) -> None:
    """Record a source's problem; log it when it begins or ends."""
    if problem != source.problem:
        fields = {"source": source.name, "problem": problem or "none"}
        log.warning("the state of a source of servers changed", extra=fields)
    source.problem = problem


def usable(address: str, *, loopback: bool = True) -> str | None:
    """Return an address as a host in a URL, or None if it is invalid or cannot be a server's.

    `loopback`: whether this machine's own address is allowed. An IPv4 address in IPv6's spelling is
    the IPv4 address. A zone belongs to a link, and the text after `%` may be anything.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address):
        if found.scope_id is not None:
            return None
        found = found.ipv4_mapped or found
    if found.is_unspecified or found.is_multicast or found.is_link_local:
        return None
    if found.is_loopback and not loopback:
        return None
    return f"[{found}]" if found.version == 6 else str(found)


def addresses(host: str, port: int) -> Lookup:
    """Return a lookup of a name's addresses with this machine's resolver."""

    async def lookup() -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in NOWHERE:
                return []
            raise Unresolved(error.strerror or "the resolver does not answer") from None
        except (OSError, UnicodeError) as error:
            raise Unresolved(f"{error}") from None
        usable_names = [name for one in found if (name := usable(str(one[4][0])))]
        # A server with addresses of both families is one server.
        hosts = [name for name in usable_names if not name.startswith("[")] or usable_names
        return [f"http://{name}:{port}" for name in sorted(set(hosts))]

    return lookup


def system_resolver() -> Any:
    """Return a resolver with this machine's name servers. Raises `PackageAbsent` and
    `OptionError`."""
    library = needed("dns.asyncresolver", "srv:// servers", "discovery", param="servers")
    try:
        return library.Resolver()
    except Exception as error:  # noqa: BLE001 - the library's own, for a file that it cannot read
        raise OptionError(f"srv:// needs name servers: {error}", param="servers") from None


def records(host: str) -> Lookup:
    """Return a lookup of the SRV records of a name: the targets with the lowest priority number.

    Weights are not used: load decides. Raises `PackageAbsent`.
    """
    resolver = system_resolver()
    known = needed("dns.resolver", "srv:// servers", "discovery", param="servers")
    exception = needed("dns.exception", "srv:// servers", "discovery", param="servers")

    async def lookup() -> list[str]:
        try:
            answer = await resolver.resolve(host, "SRV", lifetime=LOOKUP_SECONDS, search=True)
        except (known.NXDOMAIN, known.NoAnswer):
            return []
        except (exception.DNSException, OSError, ValueError) as error:
            raise Unresolved(type(error).__name__) from None
        least = min((one.priority for one in answer), default=0)
        found = set()
        for one in answer:
            # Names that differ only in case are one; names that end in a number are addresses.
            target = one.target.to_text(omit_final_dot=True).lower()
            named = _HOST.fullmatch(target) and not _NUMBER.search(target)
            if one.priority == least and one.port and named:
                found.add(f"http://{target}:{one.port}")
        return sorted(found)

    return lookup


def dns_source(text: str) -> DnsName | None:
    """Return the source of `dns://NAME:PORT` or `srv://NAME`, or None for another word. Raises
    `OptionError` and `PackageAbsent`."""
    if text.startswith("dns://"):
        found = _NAMED.fullmatch(text)
        if not found or not _HOST.fullmatch(found["host"]) or not 0 < int(found["port"]) < 65536:
            raise OptionError(f"{text[:100]!r} is not dns://NAME:PORT", param="servers")
        return DnsName(text, addresses(found["host"], int(found["port"])))
    if text.startswith("srv://"):
        found = _SERVICE.fullmatch(text)
        if not found or not _HOST.fullmatch(found["host"]):
            raise OptionError(f"{text[:100]!r} is not srv://_SERVICE._tcp.NAME", param="servers")
        return DnsName(text, records(found["host"]))
    return None
