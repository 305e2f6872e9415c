"""The endpoint picker without a gateway: its messages, its answers, its gRPC, its bounds."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from ext_proc_messages import MADE, endpoint, request, response
from hypothesis import given
from hypothesis import strategies as st
from route_servers import Mock, mocks, on_the_loop_of_servers

from headrace.base.errors import HeadraceError, OptionError, PackageAbsent, TooLarge
from headrace.base.protobuf import MalformedMessage
from headrace.base.text_prefixes import text_prefixes
from headrace.engine.simulator.routing import ROUTERS
from headrace.route import envoy_messages, ext_proc, picker
from headrace.route.asked import MAX_BODY
from headrace.route.ext_proc import BodyMode, Part
from headrace.route.gateway import Gateway
from headrace.route.picker import Picked, Picker
from headrace.route.replica import replicas_of
from headrace.server.body import BodiesInFlight

FULL = (4, 4)
CHAT = {":path": "/v1/chat/completions?x=1", "authorization": "Bearer k"}


def prompt(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text * 2000}]}).encode()


def gateway_of(count: int, policy: str = "prefix", max_body: int = MAX_BODY) -> Gateway:
    """A gateway before servers that nobody asks anything."""
    replicas = replicas_of([f"http://10.0.0.{n}:8000" for n in range(count)])
    for one in replicas:
        one.address = one.url.removeprefix("http://")
    return Gateway(replicas, ROUTERS[policy](), max_body=max_body)


def loads(gateway: Gateway) -> list[int]:
    return [one.outstanding for one in gateway.replicas]


def asked(exchange: Picked, *messages: bytes) -> list[Any]:
    async def all_of_them() -> list[Any]:
        return [
            response(one)
            for each in messages
            for one in await exchange.answers(ext_proc.read(each))
        ]

    with asyncio.Runner() as runner:
        return runner.run(all_of_them())


# Messages


@given(
    part=st.sampled_from(Part),
    headers=st.dictionaries(st.text(), st.text()),
    body=st.binary(),
    ends=st.booleans(),
    subset=st.none() | st.lists(st.text("1.:[]a", min_size=1)),
    modes=st.none() | st.tuples(*[st.sampled_from(BodyMode)] * 2),
)
def test_what_envoy_writes_is_read(
    part: Part,
    headers: dict[str, str],
    body: bytes,
    ends: bool,
    subset: list[str] | None,
    modes: tuple[int, int] | None,
) -> None:
    data = request(
        part.name.lower(), headers=headers, body=body, ends=ends, subset=subset, modes=modes
    )
    told = ext_proc.read(data)
    has_body = part in (Part.REQUEST_BODY, Part.RESPONSE_BODY)
    trailers = part in (Part.REQUEST_TRAILERS, Part.RESPONSE_TRAILERS)
    assert told.part is part
    assert told.body == (body if has_body else b"")
    assert told.ends == (ends and not trailers)
    if not has_body:
        assert told.headers == [(k.encode().lower(), v.encode()) for k, v in headers.items()]
    assert told.subset == (None if subset is None else {*subset})
    assert told.modes == modes


def test_a_subset_may_be_one_text() -> None:
    for subset, wanted in (("1:2, 3:4", {"1:2", "3:4"}), ([], set()), ("", set()), ([5], set())):
        told = ext_proc.read(request("request_headers", subset=subset))
        assert told.subset == wanted


@given(data=st.binary())
def test_bytes_that_are_no_message_are_refused_or_read(data: bytes) -> None:
    try:
        ext_proc.read(data)
        ext_proc.asked_health(data)
    except MalformedMessage:
        return


@given(cut=st.integers(1, 80))
def test_a_cut_message_is_refused(cut: int) -> None:
    data = request("request_body", body=b"x" * 100, ends=True)
    with pytest.raises(MalformedMessage):
        ext_proc.read(data[:-cut])


@given(body=st.binary(max_size=100), repeated=st.integers(1, 2000), ends=st.booleans())
def test_a_body_is_given_back_in_small_pieces(body: bytes, repeated: int, ends: bool) -> None:
    body *= repeated
    said = [response(one) for one in ext_proc.given_back(Part.RESPONSE_BODY, body, ends)]
    pieces = [one.response_body.response.body_mutation.streamed_response for one in said]
    assert b"".join(one.body for one in pieces) == body
    assert [one.end_of_stream for one in pieces[-1:]] == ([ends] if pieces else [])
    assert not any(one.end_of_stream or len(one.body) > 65_536 for one in pieces[:-1])
    assert pieces or not (ends or body)


def test_a_refusal_is_a_whole_answer() -> None:
    found = response(ext_proc.refused(503, {"retry-after": "1"}, b"{}", "headrace_x"))
    reply = found.immediate_response
    assert (reply.status.code, reply.body, reply.details) == (503, b"{}", "headrace_x")
    (header,) = reply.headers.set_headers
    assert (header.header.key, header.header.raw_value) == ("retry-after", b"1")


@pytest.mark.parametrize("part", ["request_headers", "response_trailers"])
def test_headers_are_bounded_in_bytes_and_number(part: str) -> None:
    for headers in ({"a": "x" * 70_000}, {f"{n}": "" for n in range(1025)}):
        with pytest.raises(HeadraceError) as refused:
            ext_proc.read(request(part, headers=headers))
        assert refused.value.status == 431
    space = request("request_headers", subset=["1.2.3.4:5"] * 10_000)
    with pytest.raises(HeadraceError):
        ext_proc.read(space)
    most = request(part, headers={f"{n}": "" for n in range(1024)})
    assert len(ext_proc.read(most).headers) == 1024


# Answers


@pytest.mark.parametrize("mode", BodyMode)
def test_every_body_mode_gets_an_endpoint(mode: BodyMode) -> None:
    gateway = gateway_of(3)
    exchange = Picked(Picker(gateway))
    body = prompt("a river ")
    begin = request("request_headers", headers=CHAT, modes=(mode, mode))
    if mode in (BodyMode.NONE, BodyMode.STREAMED):
        (said,) = asked(exchange, begin)
        where = endpoint(said, "request_headers")
        (said,) = asked(exchange, request("request_body", body=body, ends=True))
        assert not said.request_body.HasField("response")
    elif mode is BodyMode.FULL_DUPLEX_STREAMED:
        half = request("request_body", body=body[:1000])
        assert asked(exchange, begin, half) == []
        first, *rest = asked(exchange, request("request_body", body=body[1000:], ends=True))
        where = endpoint(first, "request_headers")
        pieces = [one.request_body.response.body_mutation.streamed_response for one in rest]
        assert b"".join(one.body for one in pieces) == body
        assert pieces[-1].end_of_stream
    else:
        (said,) = asked(exchange, begin)
        assert not said.request_headers.HasField("response")
        (said,) = asked(exchange, request("request_body", body=body, ends=True))
        where = endpoint(said, "request_body")
    assert exchange.replica is not None
    assert exchange.replica.address == where
    assert sorted(loads(gateway)) == [0, 0, 1]
    answer = request("response_headers", headers={":status": "200"})
    (said,) = asked(exchange, answer)
    assert said.WhichOneof is not None
    (said,) = asked(exchange, request("response_body", body=b"token", ends=True))
    mutation = said.response_body.response.body_mutation
    assert mutation.streamed_response.body == (b"token" if mode == 4 else b"")
    (said,) = asked(exchange, request("response_trailers"))
    assert said.HasField("response_trailers")
    exchange.close()
    assert loads(gateway) == [0, 0, 0]


def test_a_request_may_end_with_its_headers_or_its_trailers() -> None:
    one = Picker(gateway_of(2))
    (said,) = asked(Picked(one), request("request_headers", headers=CHAT, ends=True, modes=FULL))
    assert endpoint(said, "request_headers")
    said = asked(
        Picked(one),
        request("request_headers", headers=CHAT),
        request("request_body", body=b"{}"),
        request("request_trailers"),
    )
    assert endpoint(said[0], "request_headers")
    piece = said[1].request_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (b"{}", False)
    assert said[2].HasField("request_trailers")
    assert len(said) == 3


def picked(one: Picker, text: str, subset: object = None) -> tuple[str, Picked]:
    """The endpoint of a prompt, and its exchange."""
    exchange = Picked(one)
    begin = request("request_headers", headers=CHAT, subset=subset, modes=(2, 2))
    said = asked(exchange, begin, request("request_body", body=prompt(text), ends=True))
    return endpoint(said[-1], "request_body"), exchange


def test_a_prefix_goes_where_it_was_and_where_it_is_said_to_be() -> None:
    gateway = gateway_of(8)
    one = Picker(gateway)
    first = {text: picked(one, text)[0] for text in "abcd"}
    assert {text: picked(one, text)[0] for text in "abcd"} == first
    names = text_prefixes(prompt("e"), b"Bearer k").keys
    gateway._router.told(5, names, [])  # type: ignore[attr-defined]
    assert picked(one, "e")[0] == "10.0.0.5:8000"


def test_only_what_a_gateway_names_is_chosen() -> None:
    gateway = gateway_of(4)
    one = Picker(gateway)
    home, _ = picked(one, "a")
    others = [r.address for r in gateway.replicas if r.address != home]
    for _ in range(6):
        assert picked(one, "a", others[:2])[0] in others[:2]
    for subset in ([], ["10.9.9.9:1"]):
        with pytest.raises(HeadraceError) as refused:
            picked(one, "a", subset)
        assert refused.value.status == 503


def test_who_answers_nothing_is_left_alone() -> None:
    gateway = gateway_of(2, "least-loaded")
    one = Picker(gateway)
    bad = gateway.replicas[0]
    for _ in range(12):
        where, exchange = picked(one, "a")
        status = "503" if where == bad.address else "200"
        asked(exchange, request("response_headers", headers={":status": status}))
        exchange.close()
    assert not bad.may_be_chosen
    assert gateway.replicas[1].may_be_chosen
    bad.address = ""
    gateway.replicas[1].ready = False
    with pytest.raises(HeadraceError, match="no server is ready"):
        picked(one, "a")


def test_a_request_after_its_end_is_refused() -> None:
    for again in ("request_headers", "request_body", "request_trailers"):
        exchange = Picked(Picker(gateway_of(2)))
        asked(exchange, request("request_headers", ends=True))
        with pytest.raises(MalformedMessage):
            asked(exchange, request(again))


def test_bodies_are_bounded_one_by_one_and_together() -> None:
    gateway = gateway_of(2, max_body=4096)
    gateway.bodies = BodiesInFlight(10_000)
    one = Picker(gateway)
    piece = request("request_body", body=b"x" * 3000)
    exchanges = [Picked(one) for _ in range(4)]
    for each in exchanges[:3]:
        asked(each, request("request_headers", headers=CHAT), piece)
    with pytest.raises(HeadraceError) as refused:
        asked(exchanges[0], piece)
    assert refused.value.status == 413
    with pytest.raises(HeadraceError) as refused:
        asked(exchanges[3], piece)
    assert refused.value.status == 503
    for each in exchanges:
        each.close()
    assert gateway.bodies.held == 0


@given(
    st.lists(
        st.sampled_from([
            request("request_headers", headers=CHAT),
            request("request_headers", headers=CHAT, modes=(2, 2)),
            request("request_headers", headers={":path": "/"}, ends=True),
            request("request_body", body=prompt("a")),
            request("request_body", body=b"{", ends=True),
            request("request_trailers"),
            request("response_headers", headers={":status": "200"}),
            request("response_headers", headers={":status": "502"}),
            request("response_body", body=b"x"),
            request("response_trailers"),
            b"\x12\x02\x08\x07",  # Headers that are a number.
        ]),
        max_size=8,
    )
)  # fmt: skip
def test_whatever_is_sent_nothing_is_left_behind(messages: list[bytes]) -> None:
    """Any order of messages ends in answers or a typed error, and in counts of 0."""
    gateway = gateway_of(2, max_body=1500)
    exchange = Picked(Picker(gateway))
    with suppress(MalformedMessage, TooLarge):
        asked(exchange, *messages)
    assert sum(loads(gateway)) == (exchange.replica is not None)
    exchange.close()
    assert (loads(gateway), gateway.bodies.held) == ([0, 0], 0)


# gRPC


@asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[tuple[Picker, Any]]:
    """A picker, and a channel to it."""
    grpc = pytest.importorskip("grpc")
    one = Picker(gateway)
    await one.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{one.port}") as channel:
        yield one, channel
    await one.stop(0)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


def opened(channel: Any) -> Any:
    return channel.stream_stream(f"/{ext_proc.SERVICE}/Process")()


@on_the_loop_of_servers
async def test_streams_that_are_cut_give_their_load_back() -> None:
    gateway = gateway_of(3)
    async with listening(gateway) as (_, channel):
        streams = [opened(channel) for _ in range(60)]
        for number, stream in enumerate(streams):
            await stream.write(request("request_headers", headers=CHAT))
            await stream.write(request("request_body", body=prompt("a"), ends=number % 3 > 0))
        for number, stream in enumerate(streams):
            if number % 3:
                said = response(await stream.read())
                assert endpoint(said, "request_headers")
        assert sum(loads(gateway)) == 40
        assert gateway.bodies.held == 20 * len(prompt("a"))
        for stream in streams[:50]:
            stream.cancel()
        for stream in streams[50:]:
            await stream.done_writing()
        await until(lambda: sum(loads(gateway)) == 0 and gateway.bodies.held == 0)


@on_the_loop_of_servers
async def test_a_body_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(picker, "BODY_RATE", 1 << 20)
    gateway = gateway_of(2, max_body=1 << 20)
    async with listening(gateway) as (_, channel):
        for pieces, status in ((1, 408), (18, 413)):
            stream = opened(channel)
            await stream.write(request("request_headers", headers=CHAT))
            for _ in range(pieces):
                await stream.write(request("request_body", body=b"x" * 60_000))
            said = response(await stream.read()).immediate_response
            assert said.status.code == status
            assert json.loads(said.body)["error"]["type"] == "invalid_request_error"
        await until(lambda: gateway.bodies.held == 0)


@on_the_loop_of_servers
async def test_nonsense_ends_its_own_stream() -> None:
    grpc = pytest.importorskip("grpc")
    async with listening(gateway_of(2)) as (_, channel):
        for wrong in (b"", b"\xff", request("request_body", body=b"x")[:-1], b"x" * (1 << 22)):
            stream = opened(channel)
            await stream.write(wrong)
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.read()
            assert await stream.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        stream = opened(channel)
        await stream.write(request("request_headers", headers=CHAT, ends=True))
        assert endpoint(response(await stream.read()), "request_headers")


@on_the_loop_of_servers
async def test_messages_are_bounded_and_large_ones_are_read_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grpc = pytest.importorskip("grpc")
    where = []

    def read(data: bytes) -> Any:
        where.append(threading.get_ident())
        return envoy_read(data)

    envoy_read = ext_proc.read
    monkeypatch.setattr(ext_proc, "read", read)
    async with listening(gateway_of(2)) as (_, channel):
        stream = opened(channel)
        await stream.write(b"\x78\x00" * (1 << 20))
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not where
        stream = opened(channel)
        await stream.write(request("request_headers", headers={"a": "x" * 70_000}))
        assert response(await stream.read()).immediate_response.status.code == 431
        assert where.pop() != threading.get_ident()
        stream = opened(channel)
        await stream.write(request("request_headers", headers=CHAT, ends=True))
        assert endpoint(response(await stream.read()), "request_headers")
        assert where == [threading.get_ident()]
        await stream.done_writing()


@on_the_loop_of_servers
async def test_one_gateway_has_a_share_of_the_bodies() -> None:
    gateway = gateway_of(2)
    gateway.bodies = BodiesInFlight(10_000)
    async with listening(gateway) as (_, channel):
        stream = opened(channel)
        await stream.write(request("request_headers", headers=CHAT))
        await stream.write(request("request_body", body=b"x" * 6000))
        assert response(await stream.read()).immediate_response.status.code == 503
        assert gateway.bodies.held == 0


@on_the_loop_of_servers
async def test_health_is_told_as_kubernetes_asks_for_it() -> None:
    grpc = pytest.importorskip("grpc")
    gateway = gateway_of(2)

    async def status(service: str) -> int:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        data = await check(MADE["HealthCheckRequest"](service=service).SerializeToString())
        return int(MADE["HealthCheckResponse"].FromString(data).status)

    async with listening(gateway) as (_, channel):
        names = ("", "liveness", "readiness", ext_proc.SERVICE)
        assert [await status(name) for name in names] == [1, 1, 1, 1]
        for one in gateway.replicas:
            one.ready = False
        assert [await status(name) for name in names] == [2, 1, 2, 2]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await status("unknown")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@on_the_loop_of_servers
async def test_a_port_or_a_certificate_that_is_not_there_is_an_options_fault(
    tmp_path: Path,
) -> None:
    async with listening(gateway_of(1)) as (one, _):
        port = one.port
        with pytest.raises(OptionError, match="cannot listen"):
            await Picker(gateway_of(1)).start(f"127.0.0.1:{port}")
        with pytest.raises(OptionError, match=r"tls\.key"):
            await Picker(gateway_of(1)).start("127.0.0.1:0", tmp_path)
        with pytest.raises(OptionError, match="HOST:PORT"):
            await Picker(gateway_of(1)).start("9002")


@on_the_loop_of_servers
async def test_a_folder_of_kubernetes_makes_it_tls(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", "tls.key", "-out", "tls.crt"]
    subprocess.run([*command.split(), *names], cwd=tmp_path, check=True, capture_output=True)
    one = Picker(gateway_of(1))
    await one.start("127.0.0.1:0", tmp_path)
    trusted = grpc.ssl_channel_credentials((tmp_path / "tls.crt").read_bytes())
    names_it = [("grpc.ssl_target_name_override", "localhost")]
    where = f"127.0.0.1:{one.port}"
    async with grpc.aio.secure_channel(where, trusted, options=names_it) as channel:
        stream = opened(channel)
        await stream.write(request("request_headers", headers=CHAT, ends=True))
        assert endpoint(response(await stream.read()), "request_headers")
        await stream.done_writing()
    await one.stop(0)


def paper(folder: Path, name: str, *more: str) -> tuple[bytes, bytes]:
    """A key and a certificate, signed by itself where no authority is named."""
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -addext subjectAltName=DNS:localhost"
    )
    files = ["-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt"]
    subprocess.run([*command.split(), *files, *more], cwd=folder, check=True, capture_output=True)
    return (folder / f"{name}.key").read_bytes(), (folder / f"{name}.crt").read_bytes()


@on_the_loop_of_servers
async def test_only_clients_of_its_authority_may_ask(tmp_path: Path) -> None:
    """Mutual TLS; and a certificate that is changed while the picker runs is shown from then on."""
    grpc = pytest.importorskip("grpc")
    paper(tmp_path, "ca")
    by = ("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE")
    paper(tmp_path, "tls", *by)
    mine, strangers = paper(tmp_path, "mine", *by), paper(tmp_path, "stranger")
    ca = tmp_path / "ca.crt"
    one = Picker(gateway_of(1))
    with pytest.raises(OptionError, match="endpoint_picker_tls"):
        await one.start("127.0.0.1:0", None, ca)
    with pytest.raises(OptionError, match=r"none\.crt"):
        await one.start("127.0.0.1:0", tmp_path, tmp_path / "none.crt")
    await one.start("127.0.0.1:0", tmp_path, ca)

    async def picks(pair: tuple[bytes, bytes] | None, trusted: bytes) -> bool:
        shown = grpc.ssl_channel_credentials(trusted, *(pair or ()))
        options = [("grpc.ssl_target_name_override", "localhost")]
        where = f"127.0.0.1:{one.port}"
        async with grpc.aio.secure_channel(where, shown, options=options) as channel:
            stream = opened(channel)
            try:
                await stream.write(request("request_headers", headers=CHAT, ends=True))
                found = await stream.read()
                await stream.done_writing()
            except grpc.aio.AioRpcError:
                return False
            return bool(endpoint(response(found), "request_headers"))

    assert await picks(mine, ca.read_bytes())
    assert not await picks(None, ca.read_bytes())
    assert not await picks(strangers, ca.read_bytes())
    paper(tmp_path, "other")
    (tmp_path / "tls.key").write_bytes((tmp_path / "other.key").read_bytes())
    assert await picks(mine, ca.read_bytes()), "a key without its certificate changes nothing"
    other = (tmp_path / "other.crt").read_bytes()
    (tmp_path / "tls.crt").write_bytes(other)
    assert await picks(mine, other)
    assert not await picks(mine, ca.read_bytes())
    await one.stop(0)


@pytest.mark.parametrize("absent", ["grpc", "google.protobuf.message_factory"])
def test_without_its_packages_it_says_what_to_install(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    envoy_messages.TYPES.forget()
    with pytest.raises(PackageAbsent, match="pip install"):
        Picker(gateway_of(1))


@on_the_loop_of_servers
async def test_a_replicas_address_is_where_its_probe_was_answered() -> None:
    async with mocks(Mock()) as urls:
        (replica,) = replicas_of([urls[0].replace("127.0.0.1", "localhost")])
        assert replica.address == ""
        await replica.probe()
        assert replica.address.rpartition(":")[2] == urls[0].rpartition(":")[2]
        assert replica.address.startswith(("127.", "[::1]"))
        replica.connections.abort()
