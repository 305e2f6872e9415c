"""A real Envoy asks the picker by external processing, and goes where it is told."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from envoy_process import envoy
from route_servers import WORDS, Mock, mocks, on_the_loop_of_servers

from headrace.engine.simulator.routing import ROUTERS
from headrace.route import picker
from headrace.route.gateway import Gateway
from headrace.route.picker import Picker
from headrace.route.replica import replicas_of
from tiny import talker
from tiny.kept import Kept

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import headrace, kill, running

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
MODES = ["BUFFERED", "FULL_DUPLEX_STREAMED"]
LIMITS = httpx.Limits(max_connections=None)


def body(text: str = "hi", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}], **more}


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


@dataclass
class Before:
    """An Envoy and what it stands before."""

    url: str
    process: subprocess.Popen[bytes]
    gateway: Gateway
    picker: Picker
    client: httpx.AsyncClient

    async def ask(self, asked: object, **headers: str) -> httpx.Response:
        return await self.client.post(self.url + CHAT, json=asked, headers=headers)

    @property
    def loads(self) -> list[int]:
        return [one.outstanding for one in self.gateway.replicas]


@asynccontextmanager
async def before(
    folder: Path,
    urls: list[str],
    *,
    policy: str = "prefix",
    max_body: int = 1 << 20,
    by: str = "header",
    mode: str = "FULL_DUPLEX_STREAMED",
    fails_open: bool = False,
) -> AsyncIterator[Before]:
    pytest.importorskip("grpc")
    gateway = Gateway(replicas_of(urls), ROUTERS[policy](), max_body=max_body)
    await asyncio.gather(*(one.probe() for one in gateway.replicas))
    one = Picker(gateway)
    await one.start("127.0.0.1:0")
    try:
        async with (
            envoy(folder, one.port, urls, by=by, mode=mode, fails_open=fails_open) as (
                url,
                process,
            ),
            httpx.AsyncClient(limits=LIMITS, timeout=60) as client,
        ):
            yield Before(url, process, gateway, one, client)
            await until(lambda: not any(r.outstanding for r in gateway.replicas))
        assert gateway.bodies.held == 0
    finally:
        await one.stop(0)
        gateway.close()


@pytest.mark.parametrize("by", ["header", "metadata"])
@pytest.mark.parametrize("mode", MODES)
@on_the_loop_of_servers
async def test_the_answer_decides_and_a_prefix_stays(by: str, mode: str, tmp_path: Path) -> None:
    servers = [Mock() for _ in range(4)]
    async with mocks(*servers) as urls, before(tmp_path, urls, by=by, mode=mode) as at:
        forged = {"x-gateway-destination-endpoint": "127.0.0.1:9"}
        for turn in range(3):
            for user in "abcd":
                asked = body(user * 3000 + "?" * turn, stream=turn == 1)
                reply = await at.ask(asked, **forged)
                assert reply.status_code == 200, reply.text
                if turn == 1:
                    text = "".join(word for word in WORDS if f'"{word}"' in reply.text)
                    assert text == "".join(WORDS)
        users = [{one["messages"][0]["content"][0] for one in s.bodies} for s in servers]  # type: ignore[index]
        assert sorted(map(len, users)) == [1, 1, 1, 1]
        assert [len(server.bodies) for server in servers] == [3, 3, 3, 3]
        for server in servers:
            (named,) = {one[b"x-gateway-destination-endpoint"] for one in server.headers}
            assert named == server.url.removeprefix("http://").encode()
        big = body("z" * 700_000)
        assert (await at.ask(big)).status_code == 200
        assert [big] == [one for s in servers for one in s.bodies if one == big]


@pytest.mark.parametrize("mode", MODES)
@on_the_loop_of_servers
async def test_clients_that_leave_give_their_load_back(mode: str, tmp_path: Path) -> None:
    gate = asyncio.Event()
    servers = [Mock(gate=gate) for _ in range(3)]
    async with (
        mocks(*servers) as urls,
        before(tmp_path, urls, policy="least-loaded", mode=mode) as at,
    ):
        streams = [asyncio.ensure_future(at.ask(body(stream=True))) for _ in range(60)]
        await until(lambda: at.loads == [20, 20, 20])
        await until(lambda: sum(len(server.bodies) for server in servers) == 60)
        for stream in streams[:45]:
            stream.cancel()
        await until(lambda: sum(at.loads) == 15)
        await until(lambda: sum(server.cancelled for server in servers) == 45)
        gate.set()
        replies = await asyncio.gather(*streams[45:])
        assert all(reply.content.endswith(b"data: [DONE]\n\n") for reply in replies)


@on_the_loop_of_servers
async def test_an_envoy_that_stands_still_gives_its_load_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is like one whose host is gone: no connection is closed, and nobody answers."""
    monkeypatch.setattr(picker, "KEEPALIVE_MS", 1000)
    one = Mock(gate=asyncio.Event())
    async with mocks(one) as urls, before(tmp_path, urls) as at:
        streams = [asyncio.ensure_future(at.ask(body(stream=True))) for _ in range(5)]
        await until(lambda: len(one.bodies) == 5)
        at.process.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: at.loads == [0])
        finally:
            at.process.send_signal(signal.SIGCONT)
            for stream in streams:
                stream.cancel()


@pytest.mark.parametrize("mode", MODES)
@on_the_loop_of_servers
async def test_no_endpoint_is_503_and_a_subset_is_heeded(mode: str, tmp_path: Path) -> None:
    servers = [Mock() for _ in range(3)]
    async with mocks(*servers) as urls, before(tmp_path, urls, mode=mode) as at:
        two = ", ".join(url.removeprefix("http://") for url in urls[1:])
        for _ in range(6):
            assert (await at.ask(body("a" * 2000), **{"x-subset": two})).status_code == 200
        assert not servers[0].bodies
        reply = await at.ask(body(), **{"x-subset": "127.0.0.1:9"})
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert reply.json()["error"]["code"] == "overloaded"
        for server in servers:
            server.status = 503
        await asyncio.gather(*(one.probe() for one in at.gateway.replicas))
        assert (await at.ask(body())).status_code == 503
        assert not servers[0].bodies


async def answer_to_pieces(url: str, pieces: AsyncIterator[bytes]) -> bytes:
    """The beginning of the answer to a body that may not end, read while it is written."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def write() -> None:
        writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\n" % CHAT.encode())
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        async for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    writing = asyncio.ensure_future(write())
    try:
        async with asyncio.timeout(60):
            return await reader.readuntil(b"}")
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        writer.close()


@on_the_loop_of_servers
async def test_hostile_bodies_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker, "BODY_SECONDS", 1.0)
    monkeypatch.setattr("route_servers.json.loads", lambda _: {})
    one = Mock()

    async def dripping() -> AsyncIterator[bytes]:
        while True:
            yield b'{"a'
            await asyncio.sleep(0.05)

    async def huge() -> AsyncIterator[bytes]:
        for _ in range(1600):
            yield b"x" * 65_536

    async with mocks(one) as urls, before(tmp_path, urls) as at:
        for content in (b"{not json", b"\xff" * 5000, b'{"messages":' + b"[" * 99_999):
            reply = await at.client.post(at.url + CHAT, content=content)
            assert reply.content == b'{"object": "whole"}', "what is wrong with it a server says"
        highest = 0
        for pieces, status in ((huge, b"413"), (dripping, b"408")):
            found = asyncio.ensure_future(answer_to_pieces(at.url, pieces()))
            while not found.done():
                highest = max(highest, at.gateway.bodies.held)
                await asyncio.sleep(0.001)
            assert found.result().startswith(b"HTTP/1.1 " + status)
            assert b'"invalid_request_error"' in found.result()
        assert 0 < highest <= at.gateway.max_body
        assert len(one.bodies) == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fails_open", [False, True])
@on_the_loop_of_servers
async def test_without_a_picker_envoy_does_as_configured(
    fails_open: bool, mode: str, tmp_path: Path
) -> None:
    servers = [Mock() for _ in range(2)]
    async with (
        mocks(*servers) as urls,
        before(tmp_path, urls, by="metadata", mode=mode, fails_open=fails_open) as at,
    ):
        assert (await at.ask(body())).status_code == 200
        await at.picker.stop(0)
        found = Counter([(await at.ask(body())).status_code for _ in range(8)])
        if fails_open and mode == "FULL_DUPLEX_STREAMED":
            # What Envoy had sent on, and not kept, when it heard that nobody listens, is lost.
            assert {*found} <= {200, 500}
        else:
            assert found == {200 if fails_open else 500: 8}
        if fails_open and mode == "BUFFERED":
            assert min(len(server.bodies) for server in servers) >= 2


@on_the_loop_of_servers
async def test_an_endpoint_that_is_lost_is_left_alone(tmp_path: Path) -> None:
    good = Mock()
    async with mocks(good) as urls:
        urls.append("http://127.0.0.1:9")
        async with before(tmp_path, urls, policy="round-robin") as at:
            lost = at.gateway.replicas[1]
            lost.ready, lost.address = True, "127.0.0.1:9"
            found = [(await at.ask(body())).status_code for _ in range(12)]
            assert Counter(found) == {200: 9, 503: 3}
            assert not lost.may_be_chosen


@pytest.mark.asyncio
async def test_the_command_before_real_servers(kept: Kept, tmp_path: Path) -> None:
    """Two real servers, the real command and a real Envoy: what a server has cached is found, and
    answers are those of the server itself."""
    pytest.importorskip("grpc")
    model = kept(talker.make)
    serve = headrace("serve", str(model), "--port", "0", "--threads", "1", "--kernels", "cpu")
    texts = [f"{n}: " + "a river and a stone. " * 28 for n in range(6)]
    with running(serve) as one, running(serve) as two:
        picks = ("--endpoint-picker", "127.0.0.1:0")
        route = headrace("route", one.url, two.url, "--port", "0", *picks)
        with running(route) as gate:
            port = int(gate.await_line(r"endpoints are picked on port (\d+)")[1])
            async with (
                envoy(tmp_path, port, [one.url, two.url]) as (url, _),
                httpx.AsyncClient(timeout=60) as client,
            ):

                async def answer(where: str, text: str) -> tuple[str, int]:
                    asked = {"model": model.name, "prompt": text, "max_tokens": 4, "seed": 1}
                    reply = await client.post(where + "/v1/completions", json=asked)
                    assert reply.status_code == 200, reply.text
                    value = reply.json()
                    cached = value["usage"]["prompt_tokens_details"]["cached_tokens"]
                    return value["choices"][0]["text"], cached

                direct = [await answer((one, two)[n % 2].url, t) for n, t in enumerate(texts)]
                async with asyncio.timeout(20):
                    while (await client.get(gate.url + "/metrics")).text.count("} 1.0") < 4:
                        await asyncio.sleep(0.05)
                await asyncio.sleep(1)
                for text, (said, cached) in zip(texts, direct, strict=True):
                    assert cached == 0
                    again, found = await answer(url, text)
                    assert again == said
                    assert found > 0
                metrics = (await client.get(gate.url + "/metrics")).text
                assert metrics.count("headrace_route_requests_total{") == 2
                assert json.dumps(metrics).count("} 3.0") == 2, "three each"
            kill(gate.process.pid)
