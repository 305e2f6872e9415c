"""The pods of a Kubernetes service, by its EndpointSlices: listed once, then watched.

The API is called as the pod's service account. Its token is replaced while a pod runs, so it is
read again for every call. An answer is bounded in bytes. A watch that ends or breaks goes on from
the last version, or from a new list if the API has forgotten it. Needed rights: get, list and
watch of `endpointslices` in `discovery.k8s.io`.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ..base.environment import cluster_address
from ..base.errors import HeadraceError, OptionError
from ..base.foreign import Undecodable, json_reader
from .sources import MOST_SERVERS, Found, note, usable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with a pod's token, its namespace and the API's CA."""
WATCH_SECONDS = 300
"""Seconds after which the API ends a watch."""
ANSWER_SECONDS, LIST_SECONDS = 10.0, 60.0
"""Maximum seconds of silence in an answer, and of a whole list."""
SILENT = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Options of a connection: a watch may be silent, and an API that is gone sends no notice."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds before the API is called again; each further failure doubles them."""
MOST_LIST, MOST_EVENT = 4 << 20, 1 << 20
"""Bytes of a list and of one event; 1,000 endpoints take 600 kB."""
MOST_SLICES = 256
MOST_TOKEN = 64 * 1024
NAME = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(
    rf"k8s://(?:(?P<namespace>{NAME})/)?(?P<service>{NAME})(?::(?P<port>{NAME}))?/?"
)


class ApiRefused(HeadraceError):
    """Failure: the API's answer is neither a list nor a watch."""


class Stale(Exception):
    """Failure: the API has forgotten the version from which a watch should go on."""


class _Meta(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions | None = None


class _SlicePort(msgspec.Struct):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None


class _Slice(msgspec.Struct):
    metadata: _Meta
    addressType: str = ""
    endpoints: list[_Endpoint] | None = None
    ports: list[_SlicePort] | None = None


class _List(msgspec.Struct):
    metadata: _Meta
    items: list[_Slice] | None = None


class _WatchLine(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


_list, _event = json_reader(_List), json_reader(_WatchLine)
_slice, _status = json_reader(_Slice), json_reader(_Status)


class ClusterApi:
    """The Kubernetes API, as a pod reaches it."""

    def __init__(self, address: str, account: Path) -> None:
        """Create the client of `address` (`https://host:port`) with the files of a service
        account. Raises `OptionError` if they cannot be read."""
        self._account = account
        try:
            self._tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
            self.namespace = (account / "namespace").read_text().strip()
            self._token()
        except (OSError, ssl.SSLError, UnicodeDecodeError, ApiRefused) as error:
            raise OptionError(
                f"k8s:// needs a pod with a service account: {account}: {error}", param="servers"
            ) from None
        self._address = address

    def _token(self) -> str:
        """Read the token. Raises `OSError` and `ApiRefused`."""
        with (self._account / "token").open("rb") as file:
            token = file.read(MOST_TOKEN).strip()
        if not token or not token.isascii() or not token.decode().isprintable():
            raise ApiRefused("the service account's token is no token")
        return token.decode()

    @asynccontextmanager
    async def get(
        self, path: str, words: dict[str, Any], seconds: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a GET request; yield the parts of the answer. `seconds`: longest silence. Raises
        `ApiRefused`, `Stale`, `OSError` and httpx's errors."""
        headers = {"authorization": f"Bearer {self._token()}", "accept-encoding": "identity"}
        # No proxy and no redirect may get the token.
        async with (
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(
                    verify=self._tls, trust_env=False, socket_options=SILENT
                ),
                trust_env=False,
                timeout=httpx.Timeout(ANSWER_SECONDS, read=seconds),
            ) as client,
            client.stream("GET", self._address + path, params=words, headers=headers) as answer,
        ):
            if answer.status_code == 410:
                raise Stale
            if answer.status_code in (401, 403):
                raise ApiRefused(
                    f"the API answers {answer.status_code}: the service account needs get, list "
                    "and watch of endpointslices in discovery.k8s.io"
                )
            if answer.status_code != 200:
                raise ApiRefused(f"the API answers {answer.status_code}")
            yield answer.aiter_raw()


class Endpoints:
    """The ready pods of a service."""

    def __init__(self, name: str, cluster: ClusterApi, service: str, namespace: str, port: str):
        """Create the source. `port`: a name or number of the pods' port; empty: `http`, or the
        only one."""
        self.name, self.problem = name, ""
        self._cluster, self._port = cluster, port
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._words = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._slices: dict[str, tuple[str, list[str]]] = {}
        """Name of a slice → its family and the URLs of its ready pods."""
        self._heard = False
        """Whether the last watch reported an event before it broke."""

    async def watch(self, found: Found) -> None:
        wait = FIRST_PAUSE
        while True:
            try:
                async with asyncio.timeout(LIST_SECONDS):
                    version = await self._listed()
                self._tell(found)
                while True:
                    version = await self._followed(version, found)
                    wait = FIRST_PAUSE  # Only now: after a failed watch, list less often.
                    await asyncio.sleep(FIRST_PAUSE)
            except Stale:
                wait = FIRST_PAUSE if self._heard else wait
            except (ApiRefused, Undecodable, httpx.HTTPError, OSError) as error:
                wait = FIRST_PAUSE if self._heard else wait
                reason = error.message if isinstance(error, HeadraceError) else str(error)
                note(self, f"{reason or type(error).__name__:.200}")
            await asyncio.sleep(wait * random.uniform(1.0, 1.5))
            wait = min(LONGEST_PAUSE, 2 * wait)

    async def _listed(self) -> str:
        """Read the whole list; return its version."""
        body = bytearray()
        async with self._cluster.get(self._path, self._words, ANSWER_SECONDS) as parts:
            async for part in parts:
                body += part
                if len(body) > MOST_LIST:
                    raise ApiRefused(f"the API's list has more than {MOST_LIST} bytes")
        listed = _list(body)
        self._slices = {
            one.metadata.name: (one.addressType, self._urls(one))
            for one in (listed.items or ())[:MOST_SLICES]
        }
        return listed.metadata.resourceVersion

    async def _followed(self, version: str, found: Found) -> str:
        """Follow changes after a version until the API ends the watch; return the last version."""
        words = {
            **self._words,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version[:256],
            "timeoutSeconds": WATCH_SECONDS,
        }
        rest, self._heard = bytearray(), False
        async with self._cluster.get(self._path, words, WATCH_SECONDS + ANSWER_SECONDS) as parts:
            async for part in parts:
                end = part.rfind(b"\n") + 1 + len(rest) if b"\n" in part else 0
                rest += part
                for line in filter(None, rest[:end].split(b"\n")):
                    version = self._changed(line) or version
                    self._heard = True
                del rest[:end]
                if len(rest) > MOST_EVENT:
                    raise ApiRefused("the API's event does not end")
                if end:
                    self._tell(found)
        return version

    def _changed(self, line: bytes | bytearray) -> str:
        """Apply an event; return its version. Raises `Stale`, `ApiRefused` and `Undecodable`."""
        event = _event(line)
        if event.type == "ERROR":
            status = _status(bytes(event.object))
            if status.code == 410:
                raise Stale
            raise ApiRefused(f"the API ends the watch: {status.code} {status.message:.100}")
        changed = _slice(bytes(event.object))
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self._slices[changed.metadata.name] = changed.addressType, self._urls(changed)
            if len(self._slices) > MOST_SLICES:
                raise ApiRefused(f"the service has more than {MOST_SLICES} slices")
        return changed.metadata.resourceVersion

    def _tell(self, found: Found) -> None:
        """Report the addresses of ready pods, all of one family: IPv4 if there is one."""
        here = {family for family, _ in self._slices.values()}
        chosen = "IPv4" if "IPv4" in here else "IPv6"
        urls = dict.fromkeys(
            url for family, listed in self._slices.values() if family == chosen for url in listed
        )
        note(self, "" if urls else "the service has no ready pod with this port")
        found(list(urls)[:MOST_SERVERS])

    def _urls(self, one: _Slice) -> list[str]:
        port = self._number(one.ports or [])
        found = []
        for endpoint in (one.endpoints or []) if port else []:
            state = endpoint.conditions or _Conditions()
            if state.ready is False or state.terminating or not endpoint.addresses:
                continue
            address = endpoint.addresses[0]  # Consumers use the first, as the API says.
            # On this pod's own loopback there is nothing of the cluster.
            if host := usable(address, loopback=False):
                found.append(f"http://{host}:{port}")
        return found[:MOST_SERVERS]

    def _number(self, ports: list[_SlicePort]) -> int | None:
        """Return the pods' port; None if the slice does not have it."""
        if self._port.isdecimal():
            return int(self._port)
        ports = [one for one in ports if one.protocol in (None, "", "TCP")]
        named = [one for one in ports if one.name == (self._port or "http")]
        chosen = named or (ports if len(ports) == 1 and not self._port else [])
        number = chosen[0].port if chosen else None
        return number if number and 0 < number < 65536 else None


def cluster_source(text: str) -> Endpoints:
    """Return the source of `k8s://[NAMESPACE/]SERVICE[:PORT]`. Raises `OptionError`."""
    found = _SERVICE.fullmatch(text)
    port = found["port"] or "" if found else ""
    if not found or (port.isdecimal() and not 0 < int(port) < 65536):
        raise OptionError(
            f"{text[:100]!r} is not k8s://[NAMESPACE/]SERVICE[:PORT]", param="servers"
        )
    address = cluster_address()
    if address is None:
        raise OptionError(
            "k8s:// works in a pod: no KUBERNETES_SERVICE_HOST is set here", param="servers"
        )
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    cluster = ClusterApi(f"https://{host}:{address[1]}", ACCOUNT)
    namespace = found["namespace"] or cluster.namespace
    if not re.fullmatch(NAME, namespace):
        raise OptionError(f"{namespace!r:.80} is no namespace", param="servers")
    return Endpoints(text, cluster, found["service"], namespace, port)
