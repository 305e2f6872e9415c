"""Servers' reports of their caches to a gateway, and their use there."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from route_servers import Mock, gateway, mocks, on_the_loop_of_servers

from headrace.base.errors import OptionError
from headrace.base.text_prefixes import text_prefixes
from headrace.cli.route import key_of
from headrace.engine.simulator.routing import ROUTERS, Place, PrefixAffinity, Prompted
from headrace.route import holdings
from headrace.route.gateway import Gateway
from headrace.route.replica import replicas_of
from tiny import talker
from tiny.kept import Kept

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import Running, headrace, kill, running

pytestmark = pytest.mark.slow
TELLS = re.compile(r"^headrace_route_tells\{.*\} 1\.0$", re.MULTILINE)
CHAT = "/v1/chat/completions"


def body(text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text * 400}]}


def keys(asked: dict[str, object]) -> list[int]:
    return text_prefixes(httpx.Request("POST", "http://a", json=asked).content, b"").keys


def event(held: list[int] = [], gone: list[int] = [], in_work: int = 0) -> bytes:  # noqa: B006
    told = json.dumps({"held": held, "gone": gone, "in_work": in_work})
    return f"event: prefixes\ndata: {told}\n\n".encode()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


def known(app: Gateway) -> int:
    return len(app._router._held)  # type: ignore[attr-defined]


@on_the_loop_of_servers
async def test_requests_go_where_their_prefix_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "AGAIN_SECONDS", 0.01)
    servers = [Mock(tells=asyncio.Queue()) for _ in range(3)]
    one, two = body("a river "), body("a stone ")
    client = httpx.AsyncClient()
    async with client, mocks(*servers) as urls, gateway(urls, "prefix") as (url, app):
        for server, held in zip(servers, ([], keys(one), keys(two)), strict=True):
            assert server.tells is not None
            half = event(held)
            server.tells.put_nowait(half[:70])
            server.tells.put_nowait(half[70:])
        await until(lambda: known(app) == len({*keys(one), *keys(two)}))
        for _ in range(4):
            for asked in (one, two):
                assert (await client.post(url + CHAT, json=asked)).status_code == 200
        assert [len(server.bodies) for server in servers] == [0, 4, 4]
        # Others keep it busy: more than its prefix is worth.
        assert servers[1].tells is not None
        servers[1].tells.put_nowait(event(in_work=50))
        await until(lambda: app.replicas[1].load == 50)
        await client.post(url + CHAT, json=one)
        assert len(servers[1].bodies) == 4
        # Its connection ends: it is asked again, and says that it holds nothing.
        servers[1].tells.put_nowait(b"")
        await until(lambda: servers[1].listeners == 2)
        assert known(app) == len(keys(two))
        assert app.replicas[1].load == 0


@on_the_loop_of_servers
@pytest.mark.parametrize(
    "wrong", [b"data: {}\n\n", b'data: {"held": ["a"], "gone": [], "in_work": 0}\n\n', b"x" * 2**21]
)
async def test_a_server_that_tells_nonsense_is_listened_to_again(
    wrong: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holdings, "AGAIN_SECONDS", 0.01)
    server = Mock(tells=asyncio.Queue())
    assert server.tells is not None
    async with mocks(server) as urls, gateway(urls, "prefix") as (url, app):
        server.tells.put_nowait(wrong)
        await until(lambda: server.listeners == 1)
        server.tells.put_nowait(b"")
        await until(lambda: server.listeners >= 2)
        server.tells.put_nowait(event([7]))
        await until(lambda: known(app) == 1)
        async with httpx.AsyncClient() as client:
            assert (await client.post(url + CHAT, json=body("x"))).status_code == 200


@on_the_loop_of_servers
async def test_a_server_that_tells_nothing_is_known_by_what_it_was_sent() -> None:
    servers = Mock(), Mock()
    client = httpx.AsyncClient()
    async with client, mocks(*servers) as urls, gateway(urls, "prefix") as (url, _):
        for text in ("a river ", "a stone ") * 3:
            await client.post(url + CHAT, json=body(text))
    assert sorted(len({json.dumps(one) for one in server.bodies}) for server in servers) == [1, 1]


async def cached(client: httpx.AsyncClient, url: str, model: str, text: str) -> int:
    asked = {"model": model, "prompt": text, "max_tokens": 1}
    reply = await client.post(url + "/v1/completions", json=asked)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def holding(client: httpx.AsyncClient, server: Running) -> int:
    """Count the prefixes that a server reports when `/v1/prefixes/stream` is first read."""
    async with client.stream("GET", server.url + "/v1/prefixes/stream") as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                return len(json.loads(line[6:])["held"])
    raise AssertionError("it told nothing")


async def hears(client: httpx.AsyncClient, gate: Running) -> None:
    """Wait until both servers have told the gateway something."""
    async with asyncio.timeout(20):
        while len(TELLS.findall((await client.get(gate.url + "/metrics")).text)) < 2:
            await asyncio.sleep(0.05)


@pytest.mark.asyncio
async def test_a_new_gateway_knows_what_servers_hold(kept: Kept) -> None:
    """Prompts that went to real servers past any gateway are found by the first request through a
    gateway, and by that of the next gateway."""
    model = kept(talker.make)
    flags = ("--port", "0", "--threads", "1", "--kernels", "cpu")
    command = headrace("serve", str(model), *flags)
    texts = [f"{n}: " + "a river and a stone. " * 28 for n in range(8)]
    with running(command) as one, running(command) as two:
        async with httpx.AsyncClient(timeout=60) as client:
            for number, text in enumerate(texts):
                server = (one, two)[number // 2 % 2]
                assert await cached(client, server.url, model.name, text) == 0
            assert await holding(client, one) >= 4
            for _ in range(2):
                route = headrace("route", one.url, two.url, "--port", "0")
                with running(route) as gate:
                    await hears(client, gate)
                    for text in texts:
                        assert await cached(client, gate.url, model.name, text) > 0
                    kill(gate.process.pid)


@on_the_loop_of_servers
async def test_two_gateways_before_200_servers_choose_alike() -> None:
    """They share nothing but what servers tell; one of them begins late. A storm of clients that
    leave counts for nothing afterwards."""
    texts = [body(f"{n} and a river ") for n in range(50)]
    nothing: list[int] = []
    servers = [Mock(holds=keys(texts[n // 4]) if n % 4 < 2 else nothing) for n in range(200)]
    wanted = len({key for asked in texts for key in keys(asked)})
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None))
    async with client, mocks(*servers) as urls, gateway(urls, "prefix") as (first, one):
        await until(lambda: all(replica.tells for replica in one.replicas))
        async with gateway(urls, "prefix") as (second, two):
            await until(lambda: all(replica.tells for replica in two.replicas))
            assert known(one) == known(two) == wanted
            for number, asked in enumerate(texts):
                for url in (first, second):
                    assert (await client.post(url + CHAT, json=asked)).status_code == 200
                got = [len(server.bodies) for server in servers[number * 4 : number * 4 + 4]]
                assert got == [2, 0, 0, 0], "where it is held, and both choose alike"
            storm = [
                asyncio.ensure_future(client.post(url + CHAT, json={**asked, "stream": True}))
                for asked in texts * 4
                for url in (first, second)
            ]
            for place, task in enumerate(storm):
                if place % 7 == 0:
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(*storm, return_exceptions=True)
            await until(lambda: not any(r.outstanding for g in (one, two) for r in g.replicas))


@on_the_loop_of_servers
async def test_an_operators_key_is_shown_where_there_is_one() -> None:
    server = Mock(holds=[7])
    async with mocks(server) as urls:
        for key in ("", "k1"):
            (replica,) = replicas_of(urls)
            listening = asyncio.ensure_future(holdings.follow(replica, PrefixAffinity(), key))
            await until(lambda replica=replica: replica.tells)  # type: ignore[misc]
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            assert not replica.tells
    shown = [one.get(b"authorization") for one in server.headers]
    assert shown == [None, b"Bearer k1"]


@pytest.mark.parametrize("content", [b"", b"two keys", b"\xff", None], ids=repr)
def test_a_file_without_a_key_is_refused(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match="key_file"):
        key_of(file)
    file.write_text("k1\n")
    assert key_of(file) == "k1"


class Recorded(PrefixAffinity):
    """The policy, with all that it was asked and told, in its order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, list[object]]] = []

    def told(self, replica: int, held: Iterable[int], gone: Iterable[int]) -> None:
        self.log.append(("told", [replica, [*held], [*gone]]))
        super().told(replica, held, gone)

    def forget(self, replica: int) -> Iterator[None]:
        self.log.append(("forget", [replica]))
        yield from super().forget(replica)

    def choose(self, request: Prompted, replicas: Sequence[Place]) -> Place:
        chosen = super().choose(request, replicas)
        places = [(one.number, one.load) for one in replicas]
        self.log.append(("choose", [[*request.prefixes], places, chosen.number]))
        return chosen


@on_the_loop_of_servers
async def test_a_live_trace_decides_alike_where_it_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A live gateway chooses as the simulator's policy does with the same reports."""
    monkeypatch.setitem(ROUTERS, "prefix", Recorded)
    monkeypatch.setattr(holdings, "AGAIN_SECONDS", 0.01)
    servers = [Mock(tells=asyncio.Queue()), Mock(tells=asyncio.Queue()), Mock()]
    texts = [body(f"{n % 7} and a river ") for n in range(60)]
    async with mocks(*servers) as urls, gateway(urls, "prefix") as (url, app):
        async with httpx.AsyncClient() as client:
            for number, asked in enumerate(texts):
                server = servers[number % 2]
                assert server.tells is not None
                if number % 5 == 0:
                    server.tells.put_nowait(event(keys(asked), in_work=number % 4))
                if number % 13 == 12:
                    server.tells.put_nowait(b"")
                more = {**asked, "stream": number % 3 == 0}
                await asyncio.gather(*(client.post(url + CHAT, json=more) for _ in range(3)))
        live = app._router
    assert isinstance(live, Recorded)
    again = PrefixAffinity()
    choices = 0
    for what, arguments in live.log:
        if what == "choose":
            prefixes, places, number = arguments
            given = [SimPlace(*place) for place in places]  # type: ignore[attr-defined]
            chosen = again.choose(SimPlace(prefixes=prefixes), given)  # type: ignore[arg-type]
            assert chosen.number == number
            choices += 1
        else:
            [*(getattr(again, what)(*arguments) or ())]
    assert choices == 180
    assert {what for what, _ in live.log} == {"told", "forget", "choose"}


@dataclass
class SimPlace:
    number: int = 0
    load: int = 0
    prefixes: list[int] = field(default_factory=list)
