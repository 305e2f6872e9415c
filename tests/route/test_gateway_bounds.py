"""The gateway's bounds on what peers send, and what it does of a replica that lies or is silent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from route_servers import WORDS, Mock, gateway, mocks, on_the_loop_of_servers

from headrace.base.errors import OptionError, Overloaded
from headrace.base.text_prefixes import NOTHING
from headrace.engine.simulator import routing
from headrace.engine.simulator.routing import PrefixAffinity
from headrace.obs.tasks import TaskWatch
from headrace.route import asked, holdings
from headrace.route import gateway as gateways
from headrace.route.replica import Replica, replicas_of
from headrace.route.resume import Diverged, Resume
from headrace.route.upstream import ReplicaLost
from headrace.server.body import BodiesInFlight

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def body(text: str = "hi", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


def text_of(stream: bytes) -> str:
    found = [json.loads(one[6:]) for one in stream.split(b"\n\n") if b"data: {" in one]
    return "".join(c["delta"]["content"] for v in found for c in v.get("choices", ()))


@asynccontextmanager
async def raw(answers: dict[bytes, bytes | None]) -> AsyncIterator[str]:
    """A replica that sends these bytes for a path, whatever they are; None: nothing, for ever."""
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(size[0].split(b":")[1]) if size else 0)
                said = answers.get(
                    head.split(b" ")[1], b"HTTP/1.1 404 x\r\ncontent-length: 0\r\n\r\n"
                )
                if said is None:
                    await over.wait()
                    return
                writer.write(said)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        server.close()


def whole(content: bytes, kind: str = "application/json", status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


# Bodies


async def begun(url: str, *pieces: bytes, announced: int = 0, source: str = "127.0.0.1") -> Any:
    """A connection on which a request has begun, with these pieces of its body."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    size = f"content-length: {announced}" if announced else "transfer-encoding: chunked"
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n{size}\r\n\r\n".encode())
    for piece in pieces:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    return reader, writer


@on_the_loop_of_servers
async def test_a_body_that_is_announced_too_large_is_not_waited_for() -> None:
    async with mocks(Mock()) as urls, gateway(urls) as (url, app):
        reader, writer = await begun(url, announced=app.max_body + 1)
        assert b"413" in await reader.readline()
        writer.close()
        for path, status in ((CHAT, 413), ("/v1/audio/transcriptions", 200)):
            async with httpx.AsyncClient() as client:
                content = b"1" * (app.max_body + 1)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("route_servers.json.loads", lambda _: {})
                    reply = await client.post(url + path, content=content, headers=JSON)
            assert reply.status_code == status


@on_the_loop_of_servers
async def test_unfinished_bodies_have_a_total_and_each_client_a_share() -> None:
    piece = b"x" * 3000
    async with mocks(Mock()) as urls, gateway(urls) as (url, app):
        app.bodies = BodiesInFlight(10_000)
        first = await begun(url, piece)
        await until(lambda: app.bodies.held == 3000)
        reader, writer = await begun(url, piece)
        assert b"503" in await reader.readline(), "one address has half of it"
        writer.close()
        second = await begun(url, piece, source="127.0.0.2")
        third = await begun(url, piece, source="127.0.0.3")
        await until(lambda: app.bodies.held == 9000)
        reader, writer = await begun(url, piece, source="127.0.0.4")
        assert b"503" in await reader.readline(), "all have the whole of it"
        for _, left in (first, second, third, (reader, writer)):
            left.close()
        await until(lambda: app.bodies.held == 0)


@pytest.mark.parametrize(
    ("client", "owner"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("a socket", "a socket"),
    ],
)
def test_a_share_is_an_addresss_or_a_networks(client: str, owner: str) -> None:
    assert asked.owner_of({"client": (client, 1)}) == owner


@on_the_loop_of_servers
async def test_what_is_large_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies at the gateway, and the events of a stream that goes on elsewhere."""
    where: dict[str, int] = {}

    def seen(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            where[name] = threading.get_ident()
            return work(*given)

        return call

    monkeypatch.setattr(gateways, "looked", seen("body", asked.looked))
    monkeypatch.setattr(gateways, "Resume", seen("events", Resume))
    dying = Mock(dies_after=7)
    async with (
        mocks(dying, Mock()) as urls,
        gateway(urls) as (url, _),
        httpx.AsyncClient() as client,
    ):
        reply = await client.post(url + CHAT, json=body("x" * 100_000, stream=True))
        assert text_of(reply.content) == "".join(WORDS)
        assert threading.get_ident() not in where.values()
        assert where.keys() == {"body", "events"}
        await client.post(url + CHAT, json=body())
        assert where["body"] == threading.get_ident(), "a small one is not worth a thread"


def test_a_body_that_is_dear_to_parse_is_not_parsed() -> None:
    lists = b'{"stream":true,"messages":[' + b"[]," * 20_000 + b"0]}"
    assert asked.looked(CHAT, lists, b"") == (NOTHING, asked.Switches())
    wide = json.dumps(body("x" * asked.MOST_READ, stream=True)).encode()
    assert asked.looked(CHAT, wide, b"") == (NOTHING, asked.Switches())
    text = json.dumps(body("x" * 100_000, stream=True, seed=7)).encode()
    names, read = asked.looked(CHAT, text, b"")
    assert len(names.keys) > 100
    assert (read.stream, read.seed) == (True, 7)


@on_the_loop_of_servers
async def test_events_that_are_kept_for_migrations_are_bounded_together() -> None:
    dying, good = Mock(dies_after=20), Mock()
    async with (
        mocks(dying, good) as urls,
        gateway(urls) as (url, app),
        httpx.AsyncClient() as client,
    ):
        app._sent = BodiesInFlight(500)
        reply = await client.post(url + CHAT, json=body(stream=True))
        assert text_of(reply.content) == "".join(WORDS[:20]), "it ends with its server"
        assert b"replica_lost" in reply.content
        reply = await client.post(url + CHAT, json=body(stream=True))
        assert text_of(reply.content) == "".join(WORDS)
        assert app._sent.held == 0


# Seeds


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"seed": None},
        {"tools": [{"function": {"name": "f", "parameters": {"properties": {"seed": {}}}}}]},
        {"user": '"seed"'},
    ],
)
@on_the_loop_of_servers
async def test_a_request_without_a_seed_of_its_own_migrates(more: dict[str, object]) -> None:
    dying, good = Mock(dies_after=7), Mock()
    async with mocks(dying, good) as urls, gateway(urls) as (url, _), httpx.AsyncClient() as client:
        content = json.dumps(body(stream=True, **more), indent=1).encode() + b" \n"
        reply = await client.post(url + CHAT, content=content, headers=JSON)
        assert text_of(reply.content) == "".join(WORDS)
        assert dying.bodies == good.bodies
        assert isinstance(good.bodies[0]["seed"], int)
        assert good.bodies[0] | {"seed": 0} == body(stream=True, **more) | {"seed": 0}


# Replicas


@on_the_loop_of_servers
async def test_a_replica_that_says_nothing_is_a_typed_error_and_a_loss() -> None:
    client, silent = httpx.AsyncClient(timeout=60), raw({CHAT.encode(): None})
    async with client, silent as one, gateway([one], answer_seconds=0.1) as (url, app):
        for _ in range(3):
            reply = await client.post(url + CHAT, json=body())
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "replica_silent")
        assert not app.replicas[0].may_be_chosen
        assert "left alone" in (await client.get(url)).json()["replicas"][0]["state"]
        assert (await client.post(url + CHAT, json=body())).status_code == 503


@on_the_loop_of_servers
async def test_a_stream_that_falls_silent_goes_on_elsewhere() -> None:
    gate = asyncio.Event()
    silent, good = Mock(gate=gate), Mock()
    async with mocks(silent, good) as urls, gateway(urls, answer_seconds=0.5) as (url, _):
        async with httpx.AsyncClient(timeout=60) as client:
            reply = await client.post(url + CHAT, json=body(stream=True))
        assert text_of(reply.content) == "".join(WORDS)
        assert len(good.bodies) == 1
        gate.set()


@pytest.mark.parametrize(
    ("content", "kind", "problem"),
    [
        (b'{"role":"\xff"}', "application/json", "damaged"),
        (b'{"x":' + b"[" * 3000, "application/json", "damaged"),
        (b'{"role"', "application/json", "damaged"),
        (b'{"role": 5}', "application/json", ""),
        (b'{"role": "%b"}' % (b"x" * 9000), "application/json", ""),
        (b"", "application/json", ""),
        (b"OK", "text/plain", ""),
    ],
)
@on_the_loop_of_servers
async def test_an_answer_about_health_that_is_damaged_is_no_health(
    content: bytes, kind: str, problem: str
) -> None:
    answers: dict[bytes, bytes | None] = {b"/health": whole(content, kind)}
    async with raw(answers) as url:
        (one,) = replicas_of([url])
        await one.probe()
        assert one.ready is not bool(problem)
        assert problem in one.problem
        answers[b"/health"] = whole(b'{"role":"prefill"}')
        await one.probe()
        assert (one.ready, one.prefills, one.state) == (True, True, "ready")
        one.connections.abort()


@on_the_loop_of_servers
async def test_a_replica_whose_probes_stop_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our own: it is counted, the replica gets nothing, and probes begin again."""
    async with mocks(Mock()) as urls:
        (one,) = replicas_of(urls)
        tasks = TaskWatch()
        believe = Replica._believe

        def wrong(*given: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Replica, "_believe", wrong)
        task = tasks.keep("probes", one.watch, pause=0.01)
        await until(lambda: tasks.failures["probes"] > 1)
        assert not one.ready
        assert "ZeroDivisionError" in one.state
        monkeypatch.setattr(Replica, "_believe", believe)
        await until(lambda: one.ready)
        task.cancel()
        one.connections.abort()


@pytest.mark.parametrize(
    "event",
    [
        b'{"x":' + b"[" * 2000 + b"]" * 2000 + b',"held":[],"gone":[],"in_work":0}',
        b'{"\xff":1,"held":[],"gone":[],"in_work":0}',
        b'{"held":["\xff"],"gone":[],"in_work":0}',
        b'{"held":[1.5],"gone":[],"in_work":0}',
        b'{"held":[],"gone":[],"in_work":99999999999999999999}',
        b"\xff",
    ],
)
@on_the_loop_of_servers
async def test_no_report_ends_the_listening(event: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "AGAIN_SECONDS", 0.01)
    server = Mock(tells=asyncio.Queue())
    assert server.tells is not None
    async with mocks(server) as urls:
        (one,) = replicas_of(urls)
        tasks = TaskWatch()
        task = tasks.keep("reports", lambda: holdings.follow(one, PrefixAffinity()), pause=0.01)
        server.tells.put_nowait(b"data: " + event + b"\n\n")
        await until(lambda: server.listeners == 1)
        server.tells.put_nowait(b'data: {"held":[7],"gone":[],"in_work":4}\n\n')
        server.tells.put_nowait(b"")
        await until(lambda: server.listeners >= 2)
        server.tells.put_nowait(b'data: {"held":[7],"gone":[],"in_work":4}\n\n')
        await until(lambda: one.tells)
        assert one.load == 4
        assert not tasks.failures
        task.cancel()
        one.connections.abort()


@on_the_loop_of_servers
async def test_names_that_a_replica_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(holdings, "MOST_TOLD", 2)
    server = Mock(tells=asyncio.Queue())
    assert server.tells is not None
    async with mocks(server) as urls:
        (one,) = replicas_of(urls)
        task = asyncio.ensure_future(holdings.follow(one, PrefixAffinity()))
        server.tells.put_nowait(b'data: {"held":[1,2],"gone":[],"in_work":0}\n\n')
        server.tells.put_nowait(b'data: {"held":[3],"gone":[1],"in_work":0}\n\n')
        await until(lambda: one.tells)
        server.tells.put_nowait(b'data: {"held":[4],"gone":[],"in_work":0}\n\n')
        await until(lambda: server.listeners == 2)
        task.cancel()
        one.connections.abort()


def test_a_replica_is_forgotten_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walking over a million names took 0.6 s, each second for a replica that was not there."""
    monkeypatch.setattr(routing, "SLICE", 10)
    policy = PrefixAffinity()
    policy.told(0, range(35), [])
    policy.told(1, range(30, 40), [])
    assert [*policy.forget(2)] == [], "it told nothing, so nothing is looked at"
    steps = policy.forget(0)
    next(steps)
    policy.told(0, range(100, 110), [])  # Only afterwards, in the gateway; it does no harm.
    assert [*steps] == [None] * 2
    assert not any(0 in policy._holders(key) for key in range(40))
    assert all(1 in policy._holders(key) for key in range(30, 40))
    assert [*policy.forget(1)] == [None]


LONG = b"x: " + b"a" * 1000 + b"\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 999 x\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 x\r\n" + LONG * 100 + b"\r\n",
        b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + LONG * 100 + b"\r\n",
        b"no HTTP\r\n\r\n",
        b"HTTP/1.1 101 x\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    ],
    ids=["status", "head", "trailers", "nothing", "upgrade"],
)
@on_the_loop_of_servers
async def test_an_answer_that_is_none_is_a_lost_replica(answer: bytes) -> None:
    async with raw({b"/": answer}) as url:
        (one,) = replicas_of([url])

        async def read() -> None:
            connection = await one.ask(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            while await connection.part():
                pass

        with pytest.raises(ReplicaLost):
            await read()
        one.connections.abort()


@on_the_loop_of_servers
async def test_a_second_answer_goes_to_nobody() -> None:
    client, odd = httpx.AsyncClient(), raw({CHAT.encode(): whole(b"{}") + whole(b"EVIL")})
    async with client, odd as one, gateway([one]) as (url, _):
        for _ in range(3):
            reply = await client.post(url + CHAT, json=body())
            assert (reply.status_code, reply.content) == (200, b"{}")


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"id":"\xff"}',
        b'data: {"choices":[1]}',
        b'data: {"choices":{"a":1}}',
        b'data: {"choices":[{"index":"0"}]}',
        b'data: {"choices":[{"delta":{"tool_calls":[1]}}]}',
        b'data: {"choices":[{"delta":{"content":["a"]}}]}',
        b'data: {"choices":' + b"[" * 500 + b"]" * 500 + b"}",
        b'data: {"choices":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b"data: {",
    ],
)
def test_an_event_of_another_form_is_no_continuation(event: bytes) -> None:
    before = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"a river"}}]}\n\n'
    with pytest.raises(Diverged):
        Resume(before).news(event)
    with pytest.raises(Diverged):
        Resume(before + event + b"\n\n")


@on_the_loop_of_servers
async def test_an_event_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed on as it comes, and its stream is not migrated."""
    monkeypatch.setattr(gateways, "MOST_EVENT", 1000)
    event = b"data: " + b"x" * 5000
    begin = (
        b"HTTP/1.1 200 x\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    client, endless = httpx.AsyncClient(), raw({CHAT.encode(): begin + b"1388\r\n" + event[:5000]})
    async with client, endless as one, gateway([one]) as (url, app), asyncio.timeout(20):
        request = client.build_request("POST", url + CHAT, json=body(stream=True))
        reply, came = await client.send(request, stream=True), b""
        async for part in reply.aiter_bytes():
            came += part
            if len(came) >= 5000:
                break
        assert app._sent.held == 0
        await reply.aclose()


async def test_a_stream_too_long_to_keep_loses_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops being kept between two halves of an event."""
    monkeypatch.setattr(gateways, "MOST_KEPT", 20)
    parts = [b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\ndata: fo", b"ur\n\n", b"data: 5\n\n"]

    class Answer:
        headers, status, left = [(b"content-type", b"text/event-stream")], 200, [*parts, b""]

        async def part(self) -> bytes:
            return self.left.pop(0)

    came = b""

    async def send(message: Any) -> None:
        nonlocal came
        came += message.get("body", b"")

    exchange = gateways._Exchange(CHAT, send, BodiesInFlight(1 << 20))
    await exchange.relay(cast("Any", Answer()), True, None)
    assert came == b"".join(parts)
    assert not exchange.resumable


# Names, origins, headers


@on_the_loop_of_servers
async def test_a_rebound_name_is_refused_and_a_listed_one_is_not() -> None:
    evil = {"host": "evil.example:8400", "origin": "http://evil.example:8400"}
    evil["sec-fetch-site"] = "same-origin"
    client = httpx.AsyncClient()
    async with client, mocks(Mock()) as urls:
        async with gateway(urls) as (url, _):
            for path in ("/v1/models", "/metrics", "/", "/health"):
                assert (await client.get(url + path, headers=evil)).status_code == 421
            assert (await client.post(url + CHAT, json=body(), headers=evil)).status_code == 421
        async with gateway(urls, hosts=frozenset({".example"})) as (url, _):
            assert (await client.post(url + CHAT, json=body(), headers=evil)).status_code == 200
        async with gateway(urls, key="k1") as (url, _):
            assert (await client.post(url + CHAT, json=body(), headers=evil)).status_code == 200


@on_the_loop_of_servers
async def test_a_page_of_its_own_origin_works_and_others_where_they_are_listed() -> None:
    """Origins are judged here, by the name that the browser knows; replicas do not judge again."""
    one, listed = Mock(), "https://app.example"
    client = httpx.AsyncClient()
    async with client, mocks(one) as urls, gateway(urls, origins=frozenset({listed})) as (url, _):
        for origin, status in ((url, 200), (listed, 200), ("http://evil.example", 403)):
            reply = await client.post(url + CHAT, json=body(), headers={"origin": origin})
            assert reply.status_code == status
            allowed = reply.headers.get("access-control-allow-origin")
            assert allowed == (listed if origin == listed else None)
        assert len(one.headers) == 2
        for seen in one.headers:
            assert b"origin" not in seen
            assert seen[b"host"] == urls[0].removeprefix("http://").encode()
            assert seen[b"x-forwarded-host"] == url.removeprefix("http://").encode()
            assert seen[b"x-forwarded-for"] == b"127.0.0.1"
        asked = {"origin": listed, "access-control-request-method": "POST"}
        assert (await client.options(url + CHAT, headers=asked)).status_code == 204


@on_the_loop_of_servers
async def test_headers_that_connection_names_end_here() -> None:
    one = Mock(more=[(b"connection", b"x-hop"), (b"x-hop", b"1"), (b"x-end", b"2")])
    async with mocks(one) as urls, gateway(urls) as (url, _), httpx.AsyncClient() as client:
        sent = {"connection": "X-Foo, close", "x-foo": "1", "x-bar": "2"}
        reply = await client.post(url + CHAT, json=body(), headers=sent)
        assert b"x-foo" not in one.headers[0]
        assert one.headers[0][b"x-bar"] == b"2"
        assert "x-hop" not in reply.headers
        assert reply.headers["x-end"] == "2"


@on_the_loop_of_servers
async def test_an_exchange_has_one_id_on_both_sides() -> None:
    one = Mock()
    async with mocks(one) as urls, gateway(urls) as (url, _), httpx.AsyncClient() as client:
        for given in ({}, {"x-request-id": "mine"}):
            reply = await client.post(url + CHAT, json=body(), headers=given)
            assert reply.headers.get_list("x-request-id") == [
                one.headers[-1][b"x-request-id"].decode()
            ]
        assert reply.headers["x-request-id"] == "mine"


# Operation


def test_an_address_with_a_password_is_refused_and_not_repeated() -> None:
    for url in ("http://user:hunter2@127.0.0.1:80", "ftp://user:hunter2@a:1"):
        with pytest.raises(OptionError) as refused:
            replicas_of([url])
        assert "hunter2" not in refused.value.message


@on_the_loop_of_servers
async def test_with_an_operators_key_others_see_no_servers() -> None:
    client = httpx.AsyncClient()
    async with client, mocks(Mock()) as urls, gateway(urls, key="k1") as (url, _):
        assert (await client.get(url + "/metrics")).status_code == 401
        wrong = {"authorization": "Bearer k2"}
        assert (await client.get(url + "/metrics", headers=wrong)).status_code == 401
        assert "replicas" not in (await client.get(url, headers=wrong)).json()
        assert (await client.get(url + "/health")).status_code == 200
        right = {"authorization": "Bearer k1"}
        assert (await client.get(url + "/metrics", headers=right)).status_code == 200
        assert len((await client.get(url, headers=right)).json()["replicas"]) == 1


@on_the_loop_of_servers
async def test_it_says_what_it_is_and_measures_its_answers() -> None:
    one, two = Mock(), Mock(status=503)
    client = httpx.AsyncClient()
    async with client, mocks(one, two) as urls, gateway(urls) as (url, app):
        await client.post(url + CHAT, json=body())
        for each in app.replicas:
            await each.probe()
        about = (await client.get(url)).json()
        assert about["object"] == "gateway"
        assert f"POST {CHAT}" in about["routes"]
        states = {each["url"]: each["state"] for each in about["replicas"]}
        assert states == {one.url: "ready", two.url: "not ready: its health has the status 503"}
        assert (await client.get(url + "/v1/files")).json()["error"]["code"] == "route_not_found"
        text = (await client.get(url + "/metrics")).text
    families = {each.name: each for each in text_string_to_metric_families(text)}
    assert not any(
        sample.name.endswith("_created") for f in families.values() for sample in f.samples
    )
    counted = families["headrace_route_first_byte_seconds"].samples
    assert {s.labels["replica"]: s.value for s in counted if s.name.endswith("_count")}[
        one.url
    ] == 1
    assert any(
        s.labels == {"route": CHAT} and s.value == 1
        for s in families["headrace_http_request_seconds"].samples
        if s.name.endswith("_count")
    )
    assert any(
        s.labels == {"route": "unknown", "method": "GET", "status": "404"}
        for s in families["headrace_http_requests"].samples
    )


def test_a_share_of_kept_events_is_given_back_once() -> None:
    kept = BodiesInFlight(100)
    held: dict[str, Any] = {}
    kept.take(held, 60)
    with pytest.raises(Overloaded):
        kept.take(held, 60)
    kept.give(held)
    kept.give(held)
    assert kept.held == 0
