"""A server may close a connection that it kept; a request that found it so is no failure of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from headrace.bench.http import ConnectionLost, Pool, parse_url, request_bytes
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import RunOptions
from headrace.bench.run import run_bench

SENT = RunOptions(requests=12, concurrency=2, input="5", output="4", warmup=0)


def test_a_stale_connection_is_no_failure() -> None:
    with MockServer(Behaviour(ttft=0.02, itl=0.001, stale_after=3)) as server:
        outcome = run_bench(replace(SENT, url=server.url))
        assert server.seen.requests == 12, "what was not answered must not be counted twice"
    assert outcome.result["succeeded"] == 12
    again = [record for record in outcome.run.records if record.reconnected]
    assert again
    assert all(record.sent_ns < record.chunk_ns[0] for record in again)
    (finding,) = (f for f in outcome.result["findings"] if f["code"] == "reconnected")
    assert finding["text"].startswith(f"{len(again)} of 12")


def test_an_answer_that_began_is_not_asked_again() -> None:
    with MockServer(Behaviour(ttft=0.01, itl=0.001, drop_rate=1.0)) as server:
        outcome = run_bench(replace(SENT, url=server.url, requests=4))
        assert server.seen.requests == 4
    assert outcome.result["succeeded"] == 0
    assert not any(record.reconnected for record in outcome.run.records)


def test_the_pools_own_requests() -> None:
    async def ask(url: str, count: int) -> tuple[int, int]:
        pool = Pool(parse_url(url))
        body = b'{"prompt": "a", "max_tokens": 2}'
        good = 0
        for _ in range(count):
            data = request_bytes(pool.address, "POST", "/v1/completions", body)
            good += (await pool.request(data, lambda _now, _data: None)).status == 200
        pool.close()
        return good, pool.opened

    with MockServer(Behaviour(ttft=0.001, itl=0.001, stale_after=2)) as server:
        assert asyncio.run(ask(server.url, 5)) == (5, 3)
    with pytest.raises(ConnectionLost):
        asyncio.run(ask("http://127.0.0.1:9", 1))


def test_the_mock_server_reads_a_body_of_unknown_length() -> None:
    """A gateway that may change a body sends it so, and the next request on that connection."""

    async def ask(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for pieces in ((b'{"prompt": "a", ', b'"max_tokens": 2}'), (b'{"max_tokens": 1}',)):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in (*pieces, b""):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        said = b""
        while said.count(b"HTTP/1.1 200") < 2:
            part = await asyncio.wait_for(reader.read(65_536), 30)
            assert part, "it closed the connection"
            said += part
        writer.close()
        return said

    with MockServer(Behaviour(ttft=0.001, itl=0.001)) as server:
        asyncio.run(ask(server.port))
        assert server.seen.bodies == [{"prompt": "a", "max_tokens": 2}, {"max_tokens": 1}]
