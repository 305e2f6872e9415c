"""Answers as they come over a wire, however they are cut."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from headrace.bench.http import MAX_HEAD, Connection, ConnectionLost

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKS = b"transfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n2;x=y\r\nef\r\n0\r\n"


async def received(pieces: list[bytes], *, closed: bool = False) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection can be used again."""
    connection, body = Connection(), bytearray()
    connection.connection_made(Mock())
    reply = connection.send(b"", lambda _now, data: body.extend(data))
    for piece in pieces:
        connection.data_received(piece)
    if closed:
        connection.connection_lost(None)
    async with asyncio.timeout(1):
        return (await reply).status, bytes(body), connection.usable


def cuts(answer: bytes) -> list[list[bytes]]:
    halves = [[answer[:at], answer[at:]] for at in range(1, len(answer))]
    return [[answer], [bytes([byte]) for byte in answer], *halves]


@pytest.mark.parametrize(
    ("answer", "closed", "status", "body", "kept"),
    [
        (OK + b"Content-Length: 3\r\n\r\nabc", False, 200, b"abc", True),
        (OK + b"content-length: 0\r\n\r\n", False, 200, b"", True),
        (OK + b"content-length: 1\r\nConnection: close\r\n\r\na", False, 200, b"a", False),
        (OK + CHUNKS + b"\r\n", False, 200, b"abcdef", True),
        (OK + CHUNKS + b"x-trailer: 1\r\n\r\n", False, 200, b"abcdef", True),
        (OK + b"\r\nuntil it closes", True, 200, b"until it closes", False),
        (b"HTTP/1.1 204 None\r\n\r\n", False, 204, b"", True),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\na", False, 200, b"a", False),
        (
            b"HTTP/1.1 100 Continue\r\n\r\n"
            b"HTTP/1.1 429 Too Many\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\nno",
            False,
            429,
            b"no",
            True,
        ),
    ],
)
async def test_an_answer_in_pieces(
    answer: bytes, closed: bool, status: int, body: bytes, kept: bool
) -> None:
    for pieces in cuts(answer):
        assert await received(pieces, closed=closed) == (status, body, kept), pieces


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "broken HTTP"),
        (OK + b"content-length: many\r\n\r\n", "broken HTTP"),
        (OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "broken HTTP"),
        (OK + b"x: " + b"a" * MAX_HEAD, "headers without end"),
        (OK + CHUNKS + b"x: 1\r\n" * MAX_HEAD, "headers without end"),
        (b"", "closed the connection before it answered"),
        (OK + b"content-length: 9\r\n\r\nabc", "closed the connection in the middle of an answer"),
        (OK + b"transfer-encoding: chunked\r\n\r\n4\r\nab", "in the middle of an answer"),
    ],
)
async def test_what_is_no_answer_is_told(answer: bytes, why: str) -> None:
    with pytest.raises(ConnectionLost, match=why):
        await received([answer] if answer else [], closed=True)


async def test_a_second_answer_ends_the_connection() -> None:
    one = OK + b"content-length: 1\r\n\r\na"
    assert await received([one + one]) == (200, b"a", False)
    assert await received([one, one]) == (200, b"a", False)
