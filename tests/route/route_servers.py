"""Mock servers and gateways in one loop, over real sockets."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from starlette.types import Receive, Scope, Send

from headrace.base.text_prefixes import PATH_TOLD
from headrace.engine.simulator.routing import ROUTERS, PrefixAffinity
from headrace.route.gateway import Gateway
from headrace.route.holdings import follow
from headrace.route.replica import replicas_of
from headrace.server.listen import Listener, http_server
from headrace.server.run import loop_factory, take_port

WORDS = [f"w{n} " for n in range(40)]
P = ParamSpec("P")


def on_the_loop_of_servers(test: Callable[P, Coroutine[None, None, None]]) -> Callable[P, None]:
    """A test on the loop that `headrace route` runs on, whose transports are not asyncio's."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(test(*args, **kwargs))

    return run


@dataclass
class Mock:
    """A server that tells the same words to everybody, and what it was asked."""

    dies_after: int | None = None
    """Words after which its connections are cut."""
    status: int = 200
    role: str = "both"
    """Its role in a prefill/decode split."""
    gate: asyncio.Event | None = None
    """Waited for after the first word."""
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)
    clients: set[tuple[str, int]] = field(default_factory=set)
    """The other ends of its connections."""
    tells: asyncio.Queue[bytes] | None = None
    """Events of `/v1/prefixes/stream`; an empty one ends the connection."""
    holds: list[int] | None = None
    """Blocks that it reports to every listener; it reports nothing more."""
    more: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Further headers of its answers that are not streamed."""
    models: bytes = b'{"object": "whole"}'
    """Body of its answers that are not streamed."""
    listeners: int = 0
    cancelled: int = 0
    url: str = ""
    stop: Callable[[], None] = lambda: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await self._say(send, self.status, b'{"role": "%b"}' % self.role.encode())
            return
        if scope["path"] == PATH_TOLD:
            self.headers.append(dict(scope["headers"]))
            await self._tell(send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.headers.append(dict(scope["headers"]))
        asked = json.loads(body) if body else {}
        self.bodies.append(asked)
        self.clients.add(scope["client"])
        if self.status != 200 or not asked.get("stream"):
            await self._say(send, self.status, self.models)
            return
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        for place, word in enumerate(WORDS):
            if place == self.dies_after:
                raise RuntimeError("this replica dies")
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            frame = b"data: %b\n\n" % json.dumps({"id": self.url, "choices": [choice]}).encode()
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            if place == 0 and self.gate is not None:
                opened = asyncio.ensure_future(self.gate.wait())
                left = asyncio.ensure_future(receive())
                await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
                opened.cancel()
                if left.done():
                    self.cancelled += 1
                    return
                left.cancel()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _tell(self, send: Send) -> None:
        if self.tells is None and self.holds is None:
            await self._say(send, 404, b"{}")
            return
        self.listeners += 1
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        if self.holds is not None:
            told = {"held": self.holds, "gone": [], "in_work": 0}
            event = b"data: %b\n\n" % json.dumps(told).encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
        tells = self.tells or asyncio.Queue[bytes]()
        while event := await tells.get():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        raise RuntimeError("this connection ends")

    async def _say(self, send: Send, status: int, body: bytes) -> None:
        headers = [(b"content-length", b"%d" % len(body)), (b"x-of", self.url.encode()), *self.more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def served(app: object) -> AsyncIterator[tuple[str, Listener]]:
    """An ASGI application on a port of its own."""
    listener = take_port("127.0.0.1", 0)
    server = http_server(app, None, None, backlog=256, last_words=0.0)  # type: ignore[arg-type]
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.wait({running})
        listener.close()


@asynccontextmanager
async def mocks(*servers: Mock) -> AsyncIterator[list[str]]:
    """The addresses of these servers."""
    async with AsyncExitStack() as stack:
        listeners = []
        for one in servers:
            one.url, listener = await stack.enter_async_context(served(one))
            listeners.append(listener)
        yield [one.url for one in servers]
        for listener in listeners:  # All at once: each takes a while to end.
            listener.should_exit = listener.force_exit = True


@asynccontextmanager
async def gateway(
    urls: list[str], policy: str = "round-robin", **options: Any
) -> AsyncIterator[tuple[str, Gateway]]:
    """A gateway before these servers. `options`: as `Gateway` takes them."""
    replicas = replicas_of(urls)
    router = ROUTERS[policy]()
    app = Gateway(replicas, router, **options)
    listening = [
        asyncio.ensure_future(follow(one, router))
        for one in replicas
        if isinstance(router, PrefixAffinity)
    ]
    async with served(app) as (url, _):
        yield url, app
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)
    for one in replicas:
        assert one.outstanding == 0, "each request was counted until it ended"
    assert app.bodies.held == app._sent.held == 0, "each body was given back"
    app.close()
