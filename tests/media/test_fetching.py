"""Files behind http addresses, from a real server of this machine: allowed hosts alone, public
addresses alone, every redirection checked, sizes and times bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.base.errors import InvalidRequest, OptionError
from headrace.media.fetching import (
    FETCH_REFUSALS,
    FetchAddress,
    FetchLimits,
    fetch,
    is_public,
)
from headrace.server.hosts import read_fetch_hosts

WHOLE = bytes(range(256)) * 40
SLOW = threading.Event()


class Host(BaseHTTPRequestHandler):
    asked: list[tuple[str, dict[str, str]]]

    def do_GET(self) -> None:
        self.asked.append((self.path, dict(self.headers)))
        moves = {
            "/moved": "/picture?a=b",
            "/away": "http://elsewhere.example/picture",
            "/inside": f"http://localhost:{self.server.server_port}/picture",
            "/file": "file:///etc/passwd",
            "/round": "/round",
        }
        if self.path in moves:
            self.send_response(302)
            self.send_header("Location", moves[self.path])
            self.end_headers()
            return
        if self.path == "/absent":
            self.send_error(404, "secret words of a host")
            return
        self.send_response(200)
        if self.path != "/open":
            more = {"/cut": 1_000, "/lies": 1 << 40}.get(self.path, 0)
            self.send_header("Content-Length", str(len(WHOLE) + more))
        self.end_headers()
        if self.path == "/slow":
            SLOW.wait(20)
        self.wfile.write(WHOLE)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[ThreadingHTTPServer]:
    Host.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        SLOW.set()
        one.shutdown()


def refused(url: str, hosts: str, most: int = 1 << 20, seconds: float = 20.0) -> str:
    with pytest.raises(InvalidRequest) as caught:
        fetch(url, read_fetch_hosts(hosts), most, "here", FetchLimits(wall_seconds=seconds))
    assert caught.value.param == "here"
    assert "secret" not in caught.value.message
    return next(code for code, said in FETCH_REFUSALS.items() if said == caught.value.message)


def test_an_allowed_host_gives_the_file(host: ThreadingHTTPServer) -> None:
    at = f"127.0.0.1:{host.server_port}"
    for path in ("/picture", "/open", "/moved"):
        assert fetch(f"http://{at}{path}", [at], len(WHOLE)) == WHOLE
    path, headers = Host.asked[-1]
    assert path == "/picture?a=b"
    assert {name.lower() for name in headers} == {"accept", "user-agent", "connection", "host"}


def test_what_is_not_fetched(host: ThreadingHTTPServer) -> None:
    port = host.server_port
    at = f"127.0.0.1:{port}"
    before = len(Host.asked)
    assert refused(f"http://{at}/picture", "img.example.com") == "host"
    assert refused(f"http://{at}/picture", "127.0.0.1") == "host", "of another port"
    assert refused(f"http://localhost:{port}/picture", f"localhost:{port}") == "private"
    for url in (f"http://me:word@{at}/", "ftp://127.0.0.1/", f"http://{at}/ \r\nA: b", "http:///a"):
        assert refused(url, at) == "address"
    assert len(Host.asked) == before, "nobody was asked"
    assert refused(f"http://{at}/away", at) == "host"
    assert refused(f"http://{at}/inside", f"{at},localhost:{port}") == "private"
    assert refused(f"http://{at}/file", at) == "address"
    for path in ("/round", "/absent", "/cut"):
        assert refused(f"http://{at}{path}", at) == "fetch"
    assert refused(f"https://{at}/picture", at) == "fetch", "it has no certificate"
    for path in ("/picture", "/open", "/lies"):
        assert refused(f"http://{at}{path}", at, most=len(WHOLE) - 1) == "large"
    begun = time.monotonic()
    assert refused(f"http://{at}/slow", at, seconds=3.0) == "time"
    assert time.monotonic() - begun < 15


def test_names_of_hosts() -> None:
    hosts = read_fetch_hosts(" Img.Example.com, .example.org,10.0.0.1:8080,")
    assert hosts == ("img.example.com", ".example.org", "10.0.0.1:8080")
    for wrong in ("https://img.example.com", "a b", "img.example.com/path", "*.example.com"):
        with pytest.raises(OptionError, match="is no host"):
            read_fetch_hosts(wrong)
    for url in (
        "https://img.example.com/a", "http://IMG.example.com:80/a", "https://img.example.com./a",
        "https://a.b.example.org/", "http://10.0.0.1:8080/a",
    ):  # fmt: skip
        FetchAddress(url, hosts)
    for url in (
        "https://example.com/a", "https://img.example.com.evil.net/", "https://example.org/",
        "https://img.example.com:444/", "http://10.0.0.1/", "http://10.0.0.1:8081/",
        "https://evilexample.org/", "https://a.example.org:8443/",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="host"):
            FetchAddress(url, hosts)


def test_addresses_do_not_pass_for_names_below_another() -> None:
    for url in (
        "http://[fe80::1%.example.org]/", "http://[::ffff:169.254.169.254%.example.org]/",
        "http://[::1%251.example.org]/", "http://127.0.0.1%2f.example.org/",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="address"):
            FetchAddress(url, (".example.org",))
    with pytest.raises(ValueError, match="host"):
        FetchAddress("http://10.0.0.1/", read_fetch_hosts(".0.0.1"))


def test_a_port_of_one_address_is_no_part_of_another() -> None:
    hosts = read_fetch_hosts("fd00::1:8080, [fd00::2]:8080, [fd00::3]")
    for url in ("http://[fd00::1:8080]/", "http://[fd00::2]:8080/", "http://[fd00::3]/"):
        assert FetchAddress(url, hosts).literal
    for url in ("http://[fd00::1]:8080/", "http://[fd00::2:8080]/", "http://[fd00::2]/"):
        with pytest.raises(ValueError, match="host"):
            FetchAddress(url, hosts)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "0.0.0.0", "255.255.255.255", "224.0.0.1", "::1", "::", "fe80::1%eth0", "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::", "2001:0:7f00:1::", "198.18.0.1", "192.0.2.1",
        "::127.0.0.1", "::a9fe:a9fe", "::ffff:0:127.0.0.1", "fec0::1", "64:ff9b:1::7f00:1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    for address in ("93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34"):
        assert is_public(address), address
