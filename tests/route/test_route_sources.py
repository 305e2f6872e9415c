"""Sources of servers: DNS, Kubernetes, and how a gateway's servers join and leave."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster_api import ClusterApi, cluster_api, slice_of
from route_servers import WORDS, Mock, gateway, mocks, on_the_loop_of_servers

from headrace.base.errors import OptionError
from headrace.engine.simulator.routing import ROUTERS, Router
from headrace.route.endpoints import ClusterApi as Api
from headrace.route.endpoints import Endpoints
from headrace.route.gateway import Gateway
from headrace.route.meters import RouteMeter
from headrace.route.roster import Membership, read_servers
from headrace.route.sources import (
    ABSENCES,
    DnsName,
    ServerSource,
    Unresolved,
    addresses,
    records,
    usable,
)

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


async def until(true: Callable[[], bool]) -> None:
    """Wait until something is so; a test's own limit ends it otherwise."""
    while not true():
        await asyncio.sleep(0.01)


class Told:
    """The lists that a source told."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []

    def __call__(self, urls: Sequence[str]) -> None:
        self.lists.append(list(urls))

    @property
    def last(self) -> list[str] | None:
        return self.lists[-1] if self.lists else None


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


# What is written on the command line


@pytest.mark.parametrize(
    "text",
    [
        "dns://", "dns://name", "dns://name:0", "dns://name:65536", "dns://na me:1", "dns://a..b:1",
        "dns://u@name:1", "dns://[::1]:1", f"dns://{'a' * 64}:1", "srv://", "srv://a/b",
        "k8s://", "k8s://Upper", "k8s://a/b/c", "k8s://a:b:c", "k8s://a/b:0", "k8s://../a",
        "k8s://a?b=c", f"k8s://{'a' * 64}", "dns://" + "a." * 130 + ":1", "dns://" + "a" * 100_000,
    ],
)  # fmt: skip
def test_a_source_that_is_none_is_named(text: str) -> None:
    with pytest.raises(OptionError) as refused:
        read_servers([text])
    assert refused.value.param == "servers"
    assert len(refused.value.message) < 250


def test_addresses_and_sources_are_told_apart() -> None:
    pytest.importorskip("dns")
    fixed, sources = read_servers(["http://a:1", "dns://pods.example:8000", "srv://_http._tcp.a"])
    assert fixed == ["http://a:1"]
    assert [one.name for one in sources] == ["dns://pods.example:8000", "srv://_http._tcp.a"]
    with pytest.raises(OptionError, match="twice"):
        read_servers(["dns://a:1", "dns://a:1"])
    with pytest.raises(OptionError, match="KUBERNETES_SERVICE_HOST"):
        read_servers(["k8s://river"])


def test_addresses_that_no_server_has_are_left_out() -> None:
    assert usable("10.0.0.1") == "10.0.0.1"
    assert usable("fd00::1") == "[fd00::1]"
    assert usable("::ffff:10.0.0.1") == "10.0.0.1", "one server has one address"
    for text in ("0.0.0.0", "169.254.169.254", "224.0.0.1", "::", "fe80::1", "fe80::1%eth0", "a",
                 "::ffff:169.254.169.254", "::ffff:0.0.0.0", "::ffff:224.0.0.1", "fd00::1%eth0",
                 "fd00::1%x]@evil:80"):  # fmt: skip
        assert usable(text) is None
    assert usable("::1") == "[::1]"
    for text in ("127.0.0.1", "127.9.9.9", "::1", "0:0::1", "::ffff:127.0.0.1"):
        assert usable(text, loopback=False) is None


# DNS


async def test_an_address_leaves_after_some_answers_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.route.sources.RESOLVE_SECONDS", 0.0)
    one, two = "http://10.0.0.1:1", "http://10.0.0.2:1"
    answers: list[list[str] | None] = [[one, two], [one], None, [one, two], [], *[[one]] * ABSENCES]

    async def lookup() -> list[str]:
        if not answers:
            await asyncio.Event().wait()
        if (found := answers.pop(0)) is None:
            raise Unresolved("nobody knows")
        return found

    told = Told()
    task = asyncio.ensure_future(DnsName("dns://a:1", lookup).watch(told))
    await until(lambda: not answers and len(told.lists) == 4 + ABSENCES)
    assert [set(each) for each in told.lists[:4]] == [{one, two}] * 4, "None told no list"
    assert [set(each) for each in told.lists[4:]] == [{one, two}, {one}, {one}]
    await ended(task)


async def test_a_name_that_vanishes_takes_its_servers_with_it_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.route.sources.RESOLVE_SECONDS", 0.0)
    answers = [["http://10.0.0.1:1"], *[[]] * ABSENCES]

    async def lookup() -> list[str]:
        if not answers:
            await asyncio.Event().wait()
        return answers.pop(0)

    told, source = Told(), DnsName("dns://a:1", lookup)
    task = asyncio.ensure_future(source.watch(told))
    await until(lambda: len(told.lists) == 1 + ABSENCES)
    assert told.lists[-2:] == [["http://10.0.0.1:1"], []]
    assert source.problem == "the name has no address"
    await ended(task)


async def test_the_resolvers_answers_are_read_as_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    told: list[str] = ["10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1", "169.254.1.1", "fe80::1%lo"]

    async def lookup(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        return [(0, 0, 0, "", (one, 80)) for one in told]

    monkeypatch.setattr(loop, "getaddrinfo", lookup)
    assert await addresses("a", 80)() == ["http://10.0.0.1:80", "http://10.0.0.2:80"]
    told = ["fd00::2", "fe80::1%lo", "fd00::1", "fd00::1"]
    assert await addresses("a", 80)() == ["http://[fd00::1]:80", "http://[fd00::2]:80"]

    async def fails(*_: Any, **__: Any) -> None:
        raise socket.gaierror(number, "")

    monkeypatch.setattr(loop, "getaddrinfo", fails)
    number = socket.EAI_NONAME
    assert await addresses("a", 80)() == []
    number = socket.EAI_AGAIN
    with pytest.raises(Unresolved):
        await addresses("a", 80)()


@on_the_loop_of_servers
async def test_this_machines_own_name_is_resolved() -> None:
    assert "http://127.0.0.1:81" in await addresses("localhost", 81)()


class _DnsServer(asyncio.DatagramProtocol):
    """A name server that gives the records of `zone`, or none if it is empty."""

    def __init__(self) -> None:
        self.zone: list[str] = []
        self.code = 0
        self.damaged = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        import dns.message
        import dns.rrset

        asked = dns.message.from_wire(data)
        answer = dns.message.make_response(asked)
        answer.set_rcode(self.code)  # type: ignore[arg-type]
        if self.zone:
            name = asked.question[0].name
            answer.answer.append(dns.rrset.from_text(name, 1, "IN", "SRV", *self.zone))
        wire = answer.to_wire()
        self.transport.sendto(wire[:12] + b"\xc0\x0c" * 20 if self.damaged else wire, address)


@on_the_loop_of_servers
async def test_srv_records_of_the_first_priority_are_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolver = pytest.importorskip("dns.asyncresolver")
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(_DnsServer, local_addr=("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]

    def local() -> Any:
        found = resolver.Resolver.__new__(resolver.Resolver)
        found.__init__(configure=False)
        found.nameservers, found.port, found.search = ["127.0.0.1"], port, []
        return found

    monkeypatch.setattr("headrace.route.sources.LOOKUP_SECONDS", 0.3)
    monkeypatch.setattr("headrace.route.sources.system_resolver", local)
    lookup = records("_http._tcp.river.example")
    server.zone = ["1 5 8000 b.example.", "1 9 8001 a.example.", "2 0 8000 c.example.",
                   "1 0 0 d.example.", r"1 0 8000 e\032f.example.", "1 0 80 .",
                   "1 5 8000 B.Example.", "1 0 80 169.254.169.254.", "1 0 80 2852039166.",
                   "1 0 80 0xa9fea9fe."]  # fmt: skip
    assert await lookup() == ["http://a.example:8001", "http://b.example:8000"]
    server.zone = []
    assert await lookup() == []
    server.code = 3  # NXDOMAIN
    assert await lookup() == []
    server.code = 2  # SERVFAIL
    with pytest.raises(Unresolved):
        await lookup()
    server.code, server.damaged = 0, True
    with pytest.raises(Unresolved):
        await lookup()
    transport.close()


# Kubernetes


async def watched(
    api: ClusterApi, test: Callable[[Told, Endpoints], Awaitable[None]], port: str = ""
) -> None:
    """Run a test beside a source that watches the API's service `river`."""
    source = Endpoints("k8s://river", Api(api.address, api.account), "river", "here", port)
    told = Told()
    task = asyncio.ensure_future(source.watch(told))
    try:
        await test(told, source)
        assert not task.done()
    finally:
        await ended(task)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.route.endpoints.FIRST_PAUSE", 0.01)
    monkeypatch.setattr("headrace.route.endpoints.LONGEST_PAUSE", 0.02)


@on_the_loop_of_servers
async def test_the_pods_of_a_service_are_listed_and_watched(tmp_path: Path, hurried: None) -> None:
    async with cluster_api(tmp_path, slices=[slice_of("a", "10.0.0.1", "10.0.0.2")]) as api:

        async def test(told: Told, _: Endpoints) -> None:
            await until(lambda: told.last == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"])
            api.tell("ADDED", slice_of("b", "10.0.0.3"))
            await until(lambda: len(told.last or ()) == 3)
            api.tell("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
            api.tell("MODIFIED", slice_of("a", "10.0.0.2"))
            await until(lambda: told.last == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"])
            # The watch ends as the API ends it, and goes on from the last version with the token
            # that is there then.
            (tmp_path / "token").write_text("second")
            api.events.put_nowait(b"")
            await until(lambda: len(api.asked) >= 3)
            api.tell("DELETED", slice_of("a"))
            await until(lambda: told.last == ["http://10.0.0.3:8000"])

        await watched(api, test)
        assert api.paths == {"/apis/discovery.k8s.io/v1/namespaces/here/endpointslices"}
        words = [asked for asked, _ in api.asked[:3]]
        assert all(one["labelSelector"] == ["kubernetes.io/service-name=river"] for one in words)
        assert [one.get("resourceVersion") for one in words] == [None, ["3"], ["7"]]
        assert [key for _, key in api.asked[:3]] == ["Bearer first", "Bearer first",
                                                     "Bearer second"]  # fmt: skip


@on_the_loop_of_servers
async def test_a_forgotten_version_is_followed_by_a_new_list(tmp_path: Path, hurried: None) -> None:
    async with cluster_api(tmp_path, slices=[slice_of("a", "10.0.0.1")]) as api:

        async def test(told: Told, _: Endpoints) -> None:
            await until(lambda: told.last == ["http://10.0.0.1:8000"])
            api.slices = [slice_of("a", "10.0.0.9")]
            api.tell("ERROR", {"code": 410, "message": "too old"})
            await until(lambda: told.last == ["http://10.0.0.9:8000"])

        await watched(api, test)


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({"status": 403}, "needs get, list and watch of endpointslices"),
        ({"status": 500}, "answers 500"),
        ({"status": 302}, "answers 302"),
        ({"raw": b'{"metadata": {"resourceVersion": 3}}'}, "Expected `str`"),
        ({"raw": b'{"metadata"'}, "truncated"),
        ({"raw": b" " * (5 << 20)}, "more than 4194304 bytes"),
        ({"slices": []}, "no ready pod"),
        ({"slices": [slice_of("a", "10.0.0.1", named="grpc", port=0)]}, "no ready pod"),
        ({"slices": [slice_of("a", "10.0.0.1", ready=False)]}, "no ready pod"),
        ({"slices": [slice_of("a", "10.0.0.1", ready=True, terminating=True)]}, "no ready pod"),
        (
            {"slices": [slice_of("a", "127.0.0.1", "0:0::1", "169.254.1.1", "x")]},
            "no ready pod",
        ),
        ({"slices": [slice_of("a", "a.example", family="FQDN")]}, "no ready pod"),
    ],
    ids=range(12),
)
@on_the_loop_of_servers
async def test_what_the_api_answers_is_bounded_and_said(
    tmp_path: Path, hurried: None, answers: dict[str, Any], problem: str
) -> None:
    async with cluster_api(tmp_path, **answers) as api:

        async def test(told: Told, source: Endpoints) -> None:
            await until(lambda: problem in source.problem)
            assert not any(told.lists)

        await watched(api, test)


@on_the_loop_of_servers
async def test_an_event_without_end_or_of_other_words_loses_nothing(
    tmp_path: Path, hurried: None
) -> None:
    async with cluster_api(tmp_path, slices=[slice_of("a", "10.0.0.1")]) as api:

        async def test(told: Told, source: Endpoints) -> None:
            await until(lambda: told.last == ["http://10.0.0.1:8000"])
            for bad in (b"x" * 3_000_000, b'{"type": 3}\n', b'{"type": "ADDED", "object": []}\n'):
                before = len(api.asked)
                api.events.put_nowait(bad)
                await until(lambda before=before: len(api.asked) >= before + 2)  # type: ignore[misc]
            assert set(map(tuple, told.lists)) == {("http://10.0.0.1:8000",)}

        await watched(api, test)


@on_the_loop_of_servers
async def test_a_watch_that_always_fails_is_tried_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is answered each time; its watch is refused."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr("headrace.route.endpoints.asyncio.sleep", noted)
    async with cluster_api(tmp_path, slices=[slice_of("a", "10.0.0.1")]) as api:

        async def test(told: Told, source: Endpoints) -> None:
            for failed, code in enumerate((500, 410) * 4):
                while len(api.asked) < 2 * failed + 2:  # A list and a watch each time.
                    await sleep(0.01)
                api.tell("ERROR", {"code": code, "message": "no watch today"})
            while len(slept) < 8:
                await sleep(0.01)
            assert told.last == ["http://10.0.0.1:8000"], "what is listed stays"

        await watched(api, test)
    assert slept[5] > 20, "after five failures"
    assert max(slept) <= 45


@on_the_loop_of_servers
async def test_the_system_asks_whether_a_silent_api_is_there(tmp_path: Path) -> None:
    def kept() -> int:
        """This process's TCP connections that are probed for life."""
        found = 0
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family == socket.AF_INET and one.getpeername()[1] == port:
                    found += one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        return found

    async with cluster_api(tmp_path, slices=[slice_of("a", "10.0.0.1")]) as api:
        port = int(api.address.rpartition(":")[2])

        async def test(told: Told, _: Endpoints) -> None:
            await until(lambda: len(api.asked) == 2)
            assert kept()

        await watched(api, test)


@pytest.mark.parametrize(
    ("port", "slices", "found"),
    [
        ("", [slice_of("a", "10.0.0.1", named="")], ["http://10.0.0.1:8000"]),
        ("9000", [slice_of("a", "10.0.0.1")], ["http://10.0.0.1:9000"]),
        ("http", [slice_of("a", "10.0.0.1", port=81)], ["http://10.0.0.1:81"]),
        (
            "",
            [slice_of("b", "fd00::1", family="IPv6"), slice_of("a", "10.0.0.1")],
            ["http://10.0.0.1:8000"],
        ),
        ("", [slice_of("b", "fd00::1", family="IPv6")], ["http://[fd00::1]:8000"]),
    ],
    ids=range(5),
)
@on_the_loop_of_servers
async def test_ports_and_families(
    tmp_path: Path, port: str, slices: list[dict[str, Any]], found: list[str]
) -> None:
    async with cluster_api(tmp_path, slices=slices) as api:

        async def test(told: Told, _: Endpoints) -> None:
            await until(lambda: told.last == found)

        await watched(api, test, port)


@on_the_loop_of_servers
async def test_an_api_with_another_certificate_gets_no_token(tmp_path: Path, hurried: None) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with cluster_api(tmp_path / "one") as api, cluster_api(tmp_path / "two") as other:
        api.account = other.account

        async def test(_: Told, source: Endpoints) -> None:
            await until(lambda: "certificate" in source.problem.lower())

        await watched(api, test)
        assert not api.asked


def test_a_pod_without_an_account_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="service account"):
        Api("https://127.0.0.1:1", tmp_path)


# Servers of a running gateway


class Written:
    """A source whose list a test writes."""

    name, problem = "dns://test:1", ""

    def __init__(self) -> None:
        self.lists: asyncio.Queue[list[str]] = asyncio.Queue()

    async def watch(self, found: Callable[[Sequence[str]], None]) -> None:
        while True:
            urls = await self.lists.get()
            if not urls:
                raise RuntimeError("this source fails")
            found(urls)


def roster(app: Gateway, router: Router, *sources: ServerSource) -> Membership:
    found = Membership(app, router, sources)
    found.start()
    return found


def urls_of(app: Gateway) -> list[str]:
    return [one.url for one in app.replicas]


@pytest.mark.parametrize("policy", ["prefix", "round-robin"])
@on_the_loop_of_servers
async def test_servers_join_and_leave_and_no_stream_is_cut(policy: str) -> None:
    leaving, staying = Mock(gate=asyncio.Event()), Mock()
    source = Written()
    client = httpx.AsyncClient(timeout=30)
    async with client, mocks(leaving, staying) as urls, gateway([], policy) as (url, app):
        names = roster(app, app._router, source)
        assert (await client.get(url + "/health")).status_code == 503
        source.lists.put_nowait(urls[:1])
        await until(lambda: urls_of(app) == urls[:1] and app.ready)
        stream = asyncio.ensure_future(client.post(url + CHAT, json={**HELLO, "stream": True}))
        await until(lambda: app.replicas[0].outstanding == 1)
        source.lists.put_nowait(urls[1:])
        await until(lambda: len(app.replicas) == 2 and app.replicas[0].leaving)
        for _ in range(3):
            assert (await client.post(url + CHAT, json=HELLO)).headers["x-of"] == urls[1]
        assert leaving.gate is not None
        leaving.gate.set()
        text = (await stream).text
        assert sum(f'"content": "{word}"' in text for word in WORDS) == len(WORDS)
        await until(lambda: urls_of(app) == urls[1:])
        metrics = (await client.get(url + "/metrics")).text
        assert urls[1] in metrics
        assert urls[0] not in metrics
        assert "headrace_route_left_total 1.0" in metrics
        source.lists.put_nowait(urls)
        await until(lambda: set(urls_of(app)) == set(urls))
        assert not app.tasks.down
        names.stop()


@on_the_loop_of_servers
async def test_a_server_that_is_named_again_stays() -> None:
    one, source = Mock(gate=asyncio.Event()), Written()
    client = httpx.AsyncClient(timeout=30)
    async with client, mocks(one) as urls, gateway([]) as (url, app):
        names = roster(app, app._router, source)
        source.lists.put_nowait(urls)
        await until(lambda: app.ready)
        (replica,) = app.replicas
        stream = asyncio.ensure_future(client.post(url + CHAT, json={**HELLO, "stream": True}))
        await until(lambda: replica.outstanding == 1)
        source.lists.put_nowait(["http://127.0.0.1:9"])
        await until(lambda: replica.leaving)
        assert "leaving" in (await client.get(url)).json()["replicas"][0]["state"]
        source.lists.put_nowait(urls)
        await until(lambda: not replica.leaving)
        assert one.gate is not None
        one.gate.set()
        assert (await stream).status_code == 200
        assert app.replicas[0] is replica
        names.stop()


@on_the_loop_of_servers
async def test_more_servers_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.route.roster.MOST_SERVERS", 3)
    monkeypatch.setattr("headrace.route.roster.SWEEP_SECONDS", 0.01)
    source = Written()
    async with gateway(["http://127.0.0.1:9"]) as (_, app):
        names = roster(app, app._router, source)
        many = [f"http://127.0.0.{n}:9" for n in range(2, 200)]
        source.lists.put_nowait(many)
        await until(lambda: len(app.replicas) == 3)
        source.lists.put_nowait(many[1:])
        await until(lambda: urls_of(app)[1:] == many[1:3])
        names.stop()


@on_the_loop_of_servers
async def test_a_source_that_fails_is_shown_and_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Written()
    async with gateway([]) as (url, app), httpx.AsyncClient() as client:
        names = roster(app, ROUTERS["round-robin"](), source)
        source.lists.put_nowait([])
        await until(lambda: bool(app.tasks.down))
        assert "source-dns://test:1" in (await client.get(url)).json()["problems"]
        await until(lambda: not app.tasks.down)
        source.lists.put_nowait(["http://127.0.0.1:9"])
        await until(lambda: len(app.replicas) == 1)
        names.stop()


# The page


@on_the_loop_of_servers
async def test_a_browser_gets_a_page_of_servers_models_errors_and_latencies() -> None:
    good, bad = Mock(), Mock(status=500)
    evil = {"data": [{"id": "<script>alert(1)</script>"}, *[{"id": "x" * 300}] * 40]}
    good.models = json.dumps(evil).encode()
    html = {"accept": "text/html,application/xhtml+xml"}
    client = httpx.AsyncClient()
    async with client, mocks(good, bad) as urls, gateway(urls) as (url, app):
        for one in app.replicas:
            await one.list_models()
        for stream in (True, False, True, False):
            await client.post(url + CHAT, json={**HELLO, "stream": stream})
        reply = await client.get(url, headers=html)
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert reply.headers["refresh"] == "5"
        assert "<script" not in reply.text
        assert "&lt;script&gt;" in reply.text
        assert len(app.replicas[0].models) == 32
        assert max(map(len, app.replicas[0].models)) == 120
        assert all(one in reply.text for one in urls)
        assert reply.text.count("<svg") == 3
        metrics = (await client.get(url + "/metrics")).text
        assert f'headrace_route_answers_total{{replica="{urls[1]}",status="5xx"}} 2.0' in metrics
        for name in ("first_byte", "first_part", "answer", "pause"):
            assert f'headrace_route_{name}_seconds_count{{replica="{urls[0]}"}} 2.0' in metrics
        assert (await client.get(url)).json()["object"] == "gateway"


@on_the_loop_of_servers
async def test_metrics_and_page_of_many_servers_do_not_hold_the_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 1,024 servers they are a second of computing: done beside the event loop."""
    where: list[int] = []
    collect = RouteMeter.collect

    def noted(meter: RouteMeter) -> list[Any]:
        where.append(threading.get_ident())
        return collect(meter)

    times = RouteMeter.times

    def noted_times(meter: RouteMeter, what: str) -> dict[str, Any]:
        where.append(threading.get_ident())
        return times(meter, what)

    async with gateway(["http://127.0.0.1:9"]) as (url, _), httpx.AsyncClient() as client:
        monkeypatch.setattr(RouteMeter, "collect", noted)
        monkeypatch.setattr(RouteMeter, "times", noted_times)
        assert "headrace_route_ready" in (await client.get(url + "/metrics")).text
        assert "127.0.0.1:9" in (await client.get(url, headers={"accept": "text/html"})).text
    assert len(where) == 4
    assert threading.get_ident() not in where


@on_the_loop_of_servers
async def test_a_browser_shows_the_key_as_a_password() -> None:
    html = {"accept": "text/html"}
    client = httpx.AsyncClient()
    async with client, mocks(Mock()) as urls, gateway(urls, key="k1") as (url, _):
        reply = await client.get(url, headers=html)
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"].startswith("Basic ")
        assert urls[0] not in reply.text
        for given, status in (("k1", 200), ("k2", 401), ("", 401)):
            reply = await client.get(url, headers=html, auth=("any", given))
            assert reply.status_code == status
        bad = {**html, "authorization": "Basic %%%"}
        assert (await client.get(url, headers=bad)).status_code == 401
