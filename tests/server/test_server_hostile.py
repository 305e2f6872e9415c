"""Hostile input on the socket: no request, too much of one, or a missing one; raw bytes, no client.

Every refusal is typed, nothing hangs, memory stays, and the next honest client is served.
"""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Running, fake_server, memory, running

from headrace.server.protocol import BODY_RATE, most_connections

CHAT = "/v1/chat/completions"
POSTS = [
    CHAT,
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/invocations",
]
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
JSON = json.dumps(ASK).encode()
WHOLE = HEAD + b"content-length: %d\r\n\r\n%b" % (len(JSON), JSON)


BOUND = 3.0
"""Seconds that an impatient server gives a client: few, for a test sees them pass, and enough for a
client that a busy machine holds up."""


def bounded(*, seconds: float, most: int = 4096) -> list[str]:
    """A server with bounds of its own on clients."""
    code = fake_server()
    code[-1] = code[-1].replace(
        "options =",
        "from headrace.server import protocol\n"
        f"protocol.PROBE_SECONDS = {seconds}\n"
        "bounds = protocol.BoundedProtocol\n"
        f"bounds.max_connections = {most}\n"
        f"bounds.head_seconds = bounds.body_seconds = bounds.stall_seconds = {seconds}\n"
        "options =",
    )
    return code


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_server()) as server:
        served(server)
        yield server


@pytest.fixture(scope="module")
def impatient() -> Iterator[Running]:
    with running(bounded(seconds=BOUND)) as server:
        served(server)
        yield server


def served(server: Running) -> None:
    assert httpx.post(server.url + CHAT, json=ASK).status_code == 200


def idle(server: Running, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while True:
        text = httpx.get(server.url + "/metrics").text
        if "headrace_http_requests_in_work 0.0" in text:
            return
        assert time.monotonic() < end, "work went on without a client"
        time.sleep(0.05)


def connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=120)


def read(raw: socket.socket) -> bytes:
    """Until the server closes; a reset counts as its end."""
    parts = []
    try:
        while part := raw.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def exchange(server: Running, data: bytes) -> bytes:
    with connect(server) as raw:
        with suppress(ConnectionError):
            raw.sendall(data)
        return read(raw)


def refused(reply: bytes, *statuses: int) -> dict[str, Any]:
    """The error of a refusal, which is the last answer on its connection."""
    head, _, body = reply.rpartition(b"\r\n\r\n")
    status = int(re.findall(rb"HTTP/1\.1 (\d+)", head)[-1])
    assert status in (statuses or range(400, 500)), reply[:500]
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["message"]
    assert error["type"]
    return error


CLOSE = b"connection: close\r\n"
MALFORMED = {
    "garbage": b"\x00\x01\x02\xff\xfe\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no such method": b"FETCH /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a path that is no URL": b"GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\nx: a\x00b\r\n\r\n",
    "a header without colon": b"GET /health HTTP/1.1\r\nnonsense\r\n\r\n",
    "a negative length": HEAD + b"content-length: -5\r\n\r\n" + JSON,
    "a length that is no number": HEAD + b"content-length: many\r\n\r\n" + JSON,
    "a length of 60 digits": HEAD + b"content-length: " + b"9" * 60 + b"\r\n\r\n" + JSON,
    "two lengths": HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "length and chunks": HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a chunk size that is no number": HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\nab\r\n",
    "a negative chunk": HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\nab\r\n0\r\n\r\n",
    "a chunk size without end": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
    "a chunk that is longer": HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nabcdef\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_http_is_refused(server: Running, name: str) -> None:
    refused(exchange(server, MALFORMED[name]), 400)
    served(server)
    idle(server)


PATHS = {
    "not UTF-8": b"/v1/\xff\xfe",
    "quoted not UTF-8": b"/v1/%ff%fe",
    "quoted NUL": b"/v1/%00",
    "dots": b"/../../etc/passwd",
    "page dots": b"/page/..%2f..%2f..%2fetc/passwd",
    "page NUL": b"/page/%00",
    "page long": b"/page/" + b"a" * 5000,
    "star": b"*",
    "two slashes": b"//health",
    "quoted line": b"/a%0d%0ax-injected:%201",
    "a model's name": b"/v1/models/" + b"%ff" * 100,
    "response": b"/v1/responses/%ff%00",
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_that_lead_nowhere(server: Running, name: str) -> None:
    reply = exchange(server, b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (PATHS[name], CLOSE))
    assert b"x-injected" not in reply.partition(b"\r\n\r\n")[0]
    refused(reply)


BOMBS = {
    "one long header": [b"GET /health HTTP/1.1\r\nx: ", *[b"a" * 2**16] * 1600],
    "many headers": [b"GET /health HTTP/1.1\r\n", *[b"x: y\r\n" * 10_000] * 400],
    "a long path": [b"GET /", *[b"a" * 2**16] * 400],
    "a long name": [b"GET /health HTTP/1.1\r\n", *[b"a" * 2**16] * 400],
    "long trailers": [
        HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
        *[b"x: y\r\n" * 10_000] * 400,
    ],
    "a long chunk extension": [
        HEAD + b"transfer-encoding: chunked\r\n\r\n2;",
        *[b"a" * 2**16] * 400,
    ],
    "empty lines": [b"\r\n" * 2**15] * 400,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_head_without_end(impatient: Running, name: str) -> None:
    server = impatient
    before = memory(server)
    with connect(server) as raw:
        try:
            for part in BOMBS[name]:
                raw.sendall(part)
        except ConnectionError:
            pass  # It closed while we wrote; its words may be lost with the rest.
        reply = read(raw)
    if reply:
        refused(reply, 400, 408, 431)
    assert memory(server) - before < 48 * 2**20
    served(server)
    idle(server)


def test_a_head_that_is_somewhat_too_large_is_told_so(server: Running) -> None:
    big = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"
    assert refused(exchange(server, big), 431)["code"] == "head_too_large"


def test_a_thousand_connections_that_send_nothing(impatient: Running) -> None:
    server = impatient
    most_connections()  # This process has as many files open as they are.
    before = memory(server)
    silent: list[socket.socket] = []
    try:
        for place in range(1000):
            silent.append(raw := connect(server))
            if place % 10 == 0:
                raw.sendall(b"GET /health HTT")
            elif place % 10 == 1:
                raw.sendall(b"\r\n")
        served(server)
        assert memory(server) - before < 64 * 2**20
        for place, raw in enumerate(silent):
            reply = read(raw)
            if place % 10 == 0:
                refused(reply, 408)
            else:
                assert reply == b""
    finally:
        for raw in silent:
            raw.close()
    served(server)


def test_one_more_connection_than_are_allowed() -> None:
    with running(bounded(seconds=600, most=16)) as server:
        # 16 for all, 16 for probes; each one more takes the place of one that asked for nothing.
        silent = [connect(server) for _ in range(36)]
        try:
            # One more again, and accepted after all of them.
            assert httpx.get(server.url + "/health").status_code == 200
            left, _, _ = select.select(silent, [], [], 0)
            assert len(left) == 5
            for raw in left:
                reply = read(raw)
                assert reply.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 1" in reply
        finally:
            for raw in silent:
                raw.close()
        end = time.monotonic() + 120
        while httpx.post(server.url + CHAT, json=ASK).status_code != 200:
            assert time.monotonic() < end, "their places were not given back"
            time.sleep(0.05)


@pytest.mark.parametrize("sent", [b"", b'{"messages"'])
def test_a_body_that_does_not_come(impatient: Running, sent: bytes) -> None:
    with connect(impatient) as raw:
        raw.sendall(HEAD + b"content-length: 500\r\n\r\n" + sent)
        error = refused(read(raw), 408)
    assert error["code"] == "request_timeout"
    idle(impatient)


def test_a_body_that_trickles(impatient: Running) -> None:
    end = time.monotonic() + 180  # The trickle alone would take seven hours.
    with connect(impatient) as raw:
        raw.sendall(HEAD + b"content-length: 500000\r\n\r\n")
        with suppress(ConnectionError):
            while time.monotonic() < end:
                raw.sendall(b" ")
                time.sleep(0.05)
            pytest.fail("it waited for the trickle")
    idle(impatient)


def test_a_slow_body_that_moves_is_waited_for(impatient: Running) -> None:
    """Three times the bound, at three times the least rate."""
    padding = b" " * 3 * BODY_RATE
    with connect(impatient) as raw:
        raw.sendall(HEAD + CLOSE + b"content-length: %d\r\n\r\n" % (len(padding) * 9 + len(JSON)))
        for _ in range(9):
            raw.sendall(padding)
            time.sleep(BOUND / 3)
        raw.sendall(JSON)
        assert read(raw).startswith(b"HTTP/1.1 200")


def test_a_reader_of_one_byte_a_time_gets_its_answer(impatient: Running) -> None:
    with connect(impatient) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        data = json.dumps({**ASK, "max_tokens": 200, "stream": True}).encode()
        raw.sendall(HEAD + CLOSE + b"content-length: %d\r\n\r\n%b" % (len(data), data))
        begin, reply = time.monotonic(), b""
        while time.monotonic() - begin < 2 * BOUND:
            reply += raw.recv(1)
            time.sleep(0.05)
        served(impatient)
        reply += read(raw)
    assert b"data: [DONE]" in reply


def test_who_reads_nothing_is_left() -> None:
    """Its work ends, and what it did not take is given back."""
    with running(bounded(seconds=BOUND)) as server, connect(server) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        tokens = {"prompt": list(range(400)), "max_tokens": 100, "n": 128, "logprobs": 5}
        data = json.dumps({**tokens, "stream": True}).encode()
        raw.sendall(
            HEAD.replace(b"chat/", b"") + b"content-length: %d\r\n\r\n%b" % (len(data), data)
        )
        left = 'headrace_server_failures_total{kind="reader_stalled"} 1.0'
        end = time.monotonic() + 120
        while left not in httpx.get(server.url + "/metrics").text:
            assert time.monotonic() < end, "it was not left"
            time.sleep(0.05)
        idle(server)
        assert memory(server) < 400 * 2**20


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    asks = b"".join(
        b"GET /health?%d HTTP/1.1\r\nhost: x\r\nx-request-id: r%d\r\n\r\n" % (i, i)
        for i in range(499)
    )
    reply = exchange(server, asks + b"GET /health HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n")
    assert reply.count(b"HTTP/1.1 200 ") == 500
    found = [int(x) for x in re.findall(rb"x-request-id: r(\d+)", reply)]
    assert found == list(range(499))


def test_who_leaves_with_requests_in_line_stops_the_one_in_work(tmp_path: Path) -> None:
    with running(fake_server(gate=tmp_path / "gate")) as server:
        data = json.dumps({**ASK, "max_tokens": 400, "stream": True}).encode()
        one = HEAD + b"content-length: %d\r\n\r\n%b" % (len(data), data)
        with connect(server) as raw:
            raw.sendall(one * 3)
            raw.recv(100)
        idle(server)  # The first alone would never end.


def test_garbage_after_a_request_does_not_spoil_its_answer(server: Running) -> None:
    reply = exchange(server, WHOLE + b"\x00\x01garbage\r\n\r\n")
    assert reply.count(b"HTTP/1.1") <= 1
    assert b" 500 " not in reply
    idle(server)


def test_half_closed_sockets_do_not_hang(server: Running) -> None:
    for data in (WHOLE, HEAD, b"GET /hea", b""):
        with connect(server) as raw:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            assert b" 500 " not in read(raw)
    idle(server)


DEEP = 100_000
BODIES = {
    "deep lists": b"[" * DEEP,
    "deep lists, closed": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a deep field": b'{"messages":' + b"[" * 500 + b"]" * 500 + b"}",
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "half a surrogate": rb'{"messages": [{"role": "user", "content": "\ud800"}], "max_tokens": 1}',
    "a huge integer": b'{"max_tokens": ' + b"9" * 100_000 + b"}",
    "an integer over 64 bits": JSON[:-1] + b', "seed": 1' + b"0" * 30 + b"}",
    "a huge exponent": b'{"temperature": 1e999999999}',
    "NaN": b'{"temperature": NaN}',
    "Infinity": b'{"temperature": -Infinity}',
    "a byte order mark": b"\xef\xbb\xbf" + JSON,
    "UTF-16": JSON.decode().encode("utf-16"),
    "two values": JSON + JSON,
    "a control character": b'{"model": "a\x00b"}',
    "a long key": b'{"' + b"k" * 100_000 + b'": 1}',
    "nothing": b"",
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_no_request(server: Running, name: str) -> None:
    for path in POSTS:
        reply = httpx.post(
            server.url + path,
            content=BODIES[name],
            headers={"content-type": "application/json"},
        )
        if path in ("/detokenize", "/v1/messages/count_tokens") and reply.status_code == 200:
            continue
        # Weighed before it is parsed: 100,000 lists or objects are more than any request has.
        expected = 413 if name.startswith("deep ") else 400
        assert reply.status_code == expected, (path, reply.text[:300])
        message = reply.json()["error"]["message"]
        assert 0 < len(message) < 1000
