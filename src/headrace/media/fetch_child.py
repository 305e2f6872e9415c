"""Child process that fetches a file: `python -m headrace.media.fetch_child` for one address.

It writes the file to the descriptor named in its order. It has no other descriptors, little memory
and processor time, and may start no process. A name is resolved once for each request, all its
addresses are checked, and the connection goes to one of those. Nothing of the environment counts:
no proxy, no credentials.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import resource
import socket
import ssl
import sys
import time
from contextlib import suppress
from typing import Any, BinaryIO
from urllib.parse import urljoin

from .fetching import FETCH_REFUSALS, FetchAddress, is_public

_BLOCK = 1 << 16
_MOVED = {301, 302, 303, 307, 308}


class FetchRefused(Exception):
    """Refusal; its text is a key of `fetching.FETCH_REFUSALS`."""


def main() -> None:
    """Fetch as ordered by the only argument, a JSON object."""
    order = json.loads(sys.argv[1])
    for limit, value in (
        (resource.RLIMIT_AS, order["memory"]),
        (resource.RLIMIT_CPU, order["processor_seconds"]),
        (resource.RLIMIT_FSIZE, order["result"] + _BLOCK),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
    with os.fdopen(order["into"], "wb", closefd=False) as target:
        print(json.dumps(fetched(order, target)), flush=True)


def fetched(order: dict[str, Any], target: BinaryIO) -> dict[str, Any]:
    """Write the file, and return its size or the reason why there is none."""
    end, url = time.monotonic() + order["seconds"], order["url"]
    try:
        for _ in range(order["redirects"] + 1):
            moved, size = _asked(url, order, target, end)
            if not moved:
                return {"bytes": size}
            url = urljoin(url, moved)
    except FetchRefused as refused:
        return {"refused": str(refused)}
    except TimeoutError:
        return {"refused": "time"}
    except (OSError, http.client.HTTPException, ValueError):
        return {"refused": "fetch"}
    return {"refused": "fetch"}


def _asked(url: str, order: dict[str, Any], target: BinaryIO, end: float) -> tuple[str, int]:
    """Ask for an address; return where it has moved ("": it has not), and the bytes written."""
    try:
        to = FetchAddress(url, order["hosts"])
    except ValueError as refused:
        code = str(refused)
        raise FetchRefused(code if code in FETCH_REFUSALS else "address") from None
    line = _connected(to, end)
    # The connection is made already, to an address that was checked.
    asked = http.client.HTTPConnection(to.host, to.port)
    asked.sock = line
    try:
        headers = {"Accept": "*/*", "User-Agent": "headrace", "Connection": "close"}
        usual = to.port == (443 if to.secure else 80)
        asked.putrequest("GET", to.path, skip_host=True, skip_accept_encoding=True)
        asked.putheader("Host", to.shown if usual else f"{to.shown}:{to.port}")
        for name, value in headers.items():
            asked.putheader(name, value)
        asked.endheaders()
        answer = asked.getresponse()
        if answer.status in _MOVED:
            moved = answer.getheader("Location")
            if not moved:
                raise FetchRefused("fetch")
            return moved, 0
        if answer.status != 200:
            raise FetchRefused("fetch")
        return "", _read(answer, line, order["result"], target, end)
    finally:
        asked.close()


def _read(
    answer: http.client.HTTPResponse, line: socket.socket, most: int, target: BinaryIO, end: float
) -> int:
    if answer.length is not None and answer.length > most:
        raise FetchRefused("large")
    size = 0
    while True:
        line.settimeout(_left(end))
        part = answer.read1(_BLOCK)
        size += len(part)
        if size > most:
            raise FetchRefused("large")
        if not part:
            break
        target.write(part)
    if answer.length:
        raise FetchRefused("fetch")  # The host left before the end.
    target.flush()
    return size


def _connected(to: FetchAddress, end: float) -> socket.socket:
    found = socket.getaddrinfo(to.host, to.port, type=socket.SOCK_STREAM)
    if not found:
        raise FetchRefused("fetch")
    addresses = [str(one[4][0]) for one in found]
    if not to.literal and not all(is_public(one) for one in addresses):
        raise FetchRefused("private")
    line = _line(found, end)
    try:
        peer = ipaddress.ip_address(str(line.getpeername()[0]).partition("%")[0])
        if peer not in {ipaddress.ip_address(one.partition("%")[0]) for one in addresses}:
            raise FetchRefused("fetch")
        if to.secure:
            return ssl.create_default_context().wrap_socket(line, server_hostname=to.host)
    except BaseException:
        line.close()
        raise
    return line


def _line(found: list[Any], end: float) -> socket.socket:
    """Connect to the first of some addresses that answers."""
    error: OSError | None = None
    for family, kind, protocol, _, where in found:
        line = socket.socket(family, kind, protocol)
        try:
            line.settimeout(_left(end))
            line.connect(where)
        except OSError as refused:
            line.close()
            error = refused
        else:
            return line
    assert error is not None, "there are addresses"
    raise error


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


if __name__ == "__main__":
    main()
