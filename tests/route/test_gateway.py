"""The gateway before mock servers: retries, migration, cancelling, bounds, counts."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import httpx
import pytest
from route_servers import WORDS, Mock, gateway, mocks, on_the_loop_of_servers

from headrace.base.errors import OptionError
from headrace.route.replica import replicas_of
from headrace.route.upstream import ReplicaLost

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"


def body(text: str = "hi", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def words(client: httpx.AsyncClient, url: str) -> tuple[str, bytes]:
    """The text of one stream, and all its bytes."""
    reply = await client.post(url + CHAT, json=body(stream=True))
    assert reply.status_code == 200
    found = [json.loads(one[6:]) for one in reply.content.split(b"\n\n") if b"data: {" in one]
    return "".join(c["delta"]["content"] for v in found for c in v.get("choices", ())), (
        reply.content
    )


@on_the_loop_of_servers
async def test_an_answer_and_its_headers_pass_through() -> None:
    one = Mock()
    async with mocks(one) as urls, gateway(urls) as (url, _), httpx.AsyncClient() as client:
        trace = {"traceparent": "00-1-2-01", "authorization": "Bearer k", "te": "trailers"}
        reply = await client.post(url + "/chat/completions?x=1", json=body(), headers=trace)
        assert reply.json() == {"object": "whole"}
        assert reply.headers["x-of"] == one.url
        (seen,) = one.headers
        assert seen[b"traceparent"] == b"00-1-2-01"
        assert seen[b"authorization"] == b"Bearer k"
        assert seen[b"host"] == one.url.removeprefix("http://").encode()
        assert b"te" not in seen
        assert "seed" not in one.bodies[0], "what is not streamed is not changed"


@on_the_loop_of_servers
async def test_a_prefill_server_answers_only_where_nobody_else_is_ready() -> None:
    prefill, decode = Mock(role="prefill"), Mock(role="decode")
    async with (
        mocks(prefill, decode) as urls,
        gateway(urls) as (url, app),
        httpx.AsyncClient() as client,
    ):
        for replica in app.replicas:
            await replica.probe()
        for _ in range(4):
            await client.post(url + CHAT, json=body())
        assert (len(prefill.bodies), len(decode.bodies)) == (0, 4)
        decode.status = 503
        for replica in app.replicas:
            await replica.probe()
        await client.post(url + CHAT, json=body())
        assert len(prefill.bodies) == 1


@on_the_loop_of_servers
async def test_one_connection_carries_one_exchange_after_the_other() -> None:
    one = Mock()
    async with mocks(one) as urls, gateway(urls) as (url, _), httpx.AsyncClient() as client:
        for turn in range(10):
            await client.post(url + CHAT, json=body(stream=turn % 2 == 0))
        assert len(one.bodies) == 10
        assert len(one.clients) == 1


@on_the_loop_of_servers
async def test_a_lost_or_full_replica_costs_no_request_before_the_first_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.route.replica.SHORTEST_PAUSE", 600.0)
    monkeypatch.setattr("headrace.route.replica.LONGEST_PAUSE", 600.0)
    full, good = Mock(status=503), Mock()
    async with mocks(full, good) as urls:
        urls.insert(1, "http://127.0.0.1:9")  # Nobody listens on "discard".
        async with gateway(urls) as (url, app), httpx.AsyncClient() as client:
            for _ in range(20):
                assert (await client.post(url + CHAT, json=body())).status_code == 200
            assert len(good.bodies) == 20
            metrics = (await client.get(url + "/metrics")).text
            assert 'headrace_route_lost_total{replica="http://127.0.0.1:9"} 3.0' in metrics, (
                "the circuit opened after three"
            )
            assert not app.draining


@on_the_loop_of_servers
async def test_streams_that_one_death_ends_are_one_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is back after the shortest pause is asked again, however many it had."""
    monkeypatch.setattr("headrace.route.replica.SHORTEST_PAUSE", 0.2)
    dying, good = Mock(dies_after=5, gate=asyncio.Event()), Mock()
    async with mocks(dying, good) as urls, gateway(urls) as (url, _), httpx.AsyncClient() as client:
        streams = [asyncio.ensure_future(words(client, url)) for _ in range(24)]
        while len(dying.bodies) < 12:
            await asyncio.sleep(0.01)
        assert dying.gate is not None
        dying.gate.set()
        for text, _ in await asyncio.gather(*streams):
            assert text == "".join(WORDS)
        dying.dies_after, before = None, len(dying.bodies)
        await asyncio.sleep(0.3)
        for _ in range(4):
            await words(client, url)
        assert len(dying.bodies) == before + 2


@pytest.mark.parametrize("dies_after", [1, 7, 39])
@on_the_loop_of_servers
async def test_a_stream_goes_on_where_its_client_stands(dies_after: int) -> None:
    dying, good = Mock(dies_after=dies_after), Mock()
    async with mocks(dying, good) as urls, gateway(urls) as (url, _), httpx.AsyncClient() as client:
        text, whole = await words(client, url)
        assert text == "".join(WORDS)
        assert whole.endswith(b"data: [DONE]\n\n")
        assert good.url.encode() not in whole, "the exchange keeps its first name"
        assert dying.bodies == good.bodies, "with the seed that the gateway drew"
        assert isinstance(good.bodies[0]["seed"], int)


@on_the_loop_of_servers
async def test_without_migration_or_another_replica_the_stream_ends_with_an_error() -> None:
    for migrate, others in ((False, [Mock()]), (True, [])):
        dying = Mock(dies_after=3)
        async with (
            mocks(dying, *others) as urls,
            gateway(urls, migrate=migrate) as (url, _),
            httpx.AsyncClient() as client,
        ):
            text, whole = await words(client, url)
            assert text == "".join(WORDS[:3])
            assert b'"code":"replica_lost"' in whole


@on_the_loop_of_servers
async def test_a_request_that_kills_what_it_meets_does_not_kill_all() -> None:
    dying = [Mock(dies_after=2 + n) for n in range(5)]
    async with mocks(*dying) as urls, gateway(urls) as (url, _), httpx.AsyncClient() as client:
        _, whole = await words(client, url)
        assert b'"code":"replica_lost"' in whole
        assert sum(len(one.bodies) for one in dying) == 3


@on_the_loop_of_servers
async def test_a_client_that_leaves_ends_the_work() -> None:
    one = Mock(gate=asyncio.Event())
    async with mocks(one) as urls, gateway(urls) as (url, app), httpx.AsyncClient() as client:
        async with client.stream("POST", url + CHAT, json=body(stream=True)) as reply:
            async for part in reply.aiter_bytes():
                assert b"w0" in part
                break
        async with asyncio.timeout(20):
            while not one.cancelled or app.replicas[0].outstanding:
                await asyncio.sleep(0.005)


@on_the_loop_of_servers
async def test_a_draining_replica_gets_nothing_new() -> None:
    one, two = Mock(), Mock()
    async with mocks(one, two) as urls, gateway(urls) as (url, app), httpx.AsyncClient() as client:
        one.status = 503
        await asyncio.gather(*(replica.probe() for replica in app.replicas))
        one.status = 200
        for _ in range(4):
            await client.post(url + CHAT, json=body())
        assert (len(one.bodies), len(two.bodies)) == (0, 4)
        assert (await client.get(url + "/health")).status_code == 200
        two.status = 503
        await app.replicas[1].probe()
        assert (await client.get(url + "/health")).status_code == 503
        reply = await client.post(url + CHAT, json=body())
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


@on_the_loop_of_servers
async def test_what_is_not_passed_on() -> None:
    one = Mock()
    async with (
        mocks(one) as urls,
        gateway(urls, max_body=2048) as (url, _),
        httpx.AsyncClient() as client,
    ):
        assert (await client.post(url + CHAT, json=body("x" * 4000))).status_code == 413
        assert (await client.get(url + CHAT)).status_code == 405
        assert (await client.post(url + "/v1/files", json={})).status_code == 404
        assert not one.bodies
        assert (await client.post(url + CHAT, content=b"{not json")).status_code != 502


@on_the_loop_of_servers
async def test_a_prefix_stays_with_its_replica() -> None:
    servers = [Mock() for _ in range(4)]
    async with (
        mocks(*servers) as urls,
        gateway(urls, "prefix") as (url, _),
        httpx.AsyncClient() as client,
    ):
        for turn in range(3):
            for user in "abcd":
                await client.post(url + CHAT, json=body(user * 3000 + "?" * turn))
        for one in servers:
            asked = Counter(str(b["messages"][0]["content"])[0] for b in one.bodies)  # type: ignore[index]
            assert list(asked.values()) == [3]


@on_the_loop_of_servers
async def test_two_gateways_before_many_servers_count_to_nothing() -> None:
    """No count is left behind by ended, retried, migrated or abandoned requests."""
    # Two that die: a stream survives two deaths, wherever it goes.
    servers = [Mock(dies_after=5 if n % 20 == 0 else None) for n in range(40)]
    async with mocks(*servers) as urls, gateway(urls) as (a, _), gateway(urls) as (b, _):
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            found = await asyncio.gather(*(words(client, (a, b)[n % 2]) for n in range(120)))
        assert {text for text, _ in found} == {"".join(WORDS)}


@pytest.mark.parametrize(("urls", "match"), [(["a:1", "a:1"], "twice"), (["ftp://x"], "address")])
@on_the_loop_of_servers
async def test_addresses_that_are_none(urls: list[str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        replicas_of(urls)


@on_the_loop_of_servers
async def test_a_late_replica_keeps_what_it_has_and_a_silent_one_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that accepts and says nothing, beside a clock that is moved by hand."""
    clock = [100.0]
    monkeypatch.setattr("headrace.route.replica.LATE_SECONDS", 0.05)
    monkeypatch.setattr("headrace.route.replica.time.monotonic", lambda: clock[0])

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            pass
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        (one,) = replicas_of([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"])
        stream = asyncio.ensure_future(one.ask(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"))
        for seconds, chosen in ((1.0, True), (5.0, False)):
            clock[0] += seconds
            await one.probe()
            assert one.may_be_chosen is chosen
            assert not stream.done()
        clock[0] += 20.0
        await one.probe()
        with pytest.raises(ReplicaLost):
            await stream
        one.connections.abort()


@on_the_loop_of_servers
async def test_a_body_that_nests_too_deep_is_the_servers_to_refuse() -> None:
    one = Mock(status=400)
    client = httpx.AsyncClient()
    async with client, mocks(one) as urls, gateway(urls, "prefix") as (url, _):
        for content in (b'{"a":' * 99_999, b'{"messages":' + b"[" * 99_999, b"[" * 99_999):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("route_servers.json.loads", lambda _: {})
                reply = await client.post(url + CHAT, content=content)
            assert reply.status_code == 400
