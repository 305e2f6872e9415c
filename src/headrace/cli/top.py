"""`headrace top`: a running server, live in the terminal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict
from typing import Annotated

import httpx
from rich.console import Console
from rich.live import Live

from .flags import argument, flag

try:
    import termios
    import tty
except ImportError:  # Windows: Ctrl-C quits
    termios = None  # type: ignore[assignment]

from ..base.errors import HeadraceError, InvalidRequest, Unreachable
from .remote import API_KEY, HERE, Url, named, unreachable
from .top_source import Reading, readings
from .top_view import Screen, advice, line

AGAIN_SECONDS = 2.0


def command(
    server: Annotated[
        str | None, argument(f"The server; none: {HERE}.", show_default=False)
    ] = None,
    url: Url = None,
    key: Annotated[
        str | None, flag("API key of an operator.", *API_KEY, envvar="HEADRACE_API_KEY")
    ] = None,
    interval: Annotated[
        float, flag("Seconds between readings of /metrics.", "--interval", min=0.1)
    ] = 1.0,
    once: Annotated[bool, flag("Print one reading and stop.", "--once")] = False,
    as_json: Annotated[bool, flag("Readings as JSON lines.", "--json")] = False,
) -> None:
    """Watch a server: ours, or any with vLLM's or NIM's metrics. q quits."""
    address = named(server, url, HERE)
    with suppress(KeyboardInterrupt):
        asyncio.run(_top(address, key, interval, once=once, as_json=as_json))


async def _top(url: str, key: str | None, interval: float, *, once: bool, as_json: bool) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # After this much silence the stream's server counts as lost.
    timeout = httpx.Timeout(10.0, read=30.0)
    try:
        base = url.rstrip("/") + "/"
        client = httpx.AsyncClient(base_url=base, headers=headers, timeout=timeout)
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"{url!r} is no URL: {error}", param="url") from None
    async with client:
        if once or as_json or not sys.stdout.isatty():
            async with aclosing(_lasting(client, interval, patient=not once)) as found:
                async for reading in found:
                    if not isinstance(reading, Reading):
                        sys.stderr.write(f"{reading}\n")
                        continue
                    print(json.dumps(asdict(reading)) if as_json else line(reading), flush=True)
                    if once:
                        if not as_json:
                            print(advice(reading))
                        return
            return
        await _live(client, url, interval)


async def _live(client: httpx.AsyncClient, url: str, interval: float) -> None:
    console = Console(markup=False)
    screen = Screen(url)
    quit_ = asyncio.Event()
    with _keys(quit_), Live(console=console, screen=True, auto_refresh=False) as live:

        async def follow() -> None:
            async with aclosing(_lasting(client, interval, patient=True)) as found:
                async for reading in found:
                    if isinstance(reading, Reading):
                        screen.add(reading)
                    else:
                        screen.problem = reading
                    live.update(screen.draw(console.height, console.width), refresh=True)

        live.update(screen.draw(console.height, console.width), refresh=True)
        following = asyncio.ensure_future(follow())
        quitting = asyncio.ensure_future(quit_.wait())
        await asyncio.wait({following, quitting}, return_when=asyncio.FIRST_COMPLETED)
        quitting.cancel()
        if following.done():
            following.result()
        else:
            following.cancel()
            await asyncio.wait({following})


async def _lasting(
    client: httpx.AsyncClient, interval: float, *, patient: bool
) -> AsyncGenerator[Reading | str]:
    """Yield readings, or a sentence instead of one; resume when the server does.

    Raises errors that a retry cannot fix: a server that has never answered, or any problem unless
    `patient`.
    """
    answered = False
    while True:
        try:
            async with aclosing(readings(client, interval)) as found:
                async for reading in found:
                    answered = True
                    yield reading
            problem = "the server has ended the stream"
        except httpx.HTTPError as error:
            problem = unreachable(client.base_url, error).message
        except HeadraceError as error:
            if error.status < 500:
                raise
            problem, answered = error.message, True
        if not (patient and answered):
            raise Unreachable(problem)
        yield f"{problem}; trying again"
        await asyncio.sleep(AGAIN_SECONDS)


@contextmanager
def _keys(quit_: asyncio.Event) -> Iterator[None]:
    """Set the event on q, Q and Escape inside the block; restore the terminal afterwards."""
    if termios is None or not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def typed() -> None:
        if os.read(descriptor, 64)[:1] in (b"q", b"Q", b"\x1b", b"\x03"):
            quit_.set()

    loop = asyncio.get_running_loop()
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, typed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
