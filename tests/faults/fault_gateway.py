"""The rows of the fault table that need a gateway before servers, beside those of `fault_rows`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
from attacks import Attacker
from fault_client import LIMIT, Row, all_of
from fault_rows import Place, place
from fault_servers import longest_hold
from processes import headrace, running

BODY = 32 * 2**20
"""`--max-body` of the gateway, so that bodies of 30 MiB are no longer refused by their size."""


@contextlib.contextmanager
def gateway(own: Place, *more: str) -> Iterator[Place]:
    """A gateway before this server."""
    with running(headrace("route", own.server.url, "--port", "0", *more)) as gate:
        yield Place(gate, own.model, own.folder)


async def gateway_doors(folder: Path) -> Row | None:
    """Measure how long 30 MiB at each entry hold the event loop: bodies, and messages of the
    picker.

    Returns None without gRPC.
    """
    if find_spec("grpc") is None:
        return None
    row = Row("forge", "30 MiB at each door of a gateway, one after the other: event loop")
    row.limits["hold_seconds"] = 0.05
    flags = ("--max-body", str(BODY), "--endpoint-picker", "127.0.0.1:0")
    with place(folder) as own, gateway(own, *flags) as gate:
        port = gate.server.await_line(r"picked on port (\d+)")[1]
        await all_of(gate.url, [gate.ask(4)])
        row.facts["hold_before_seconds"] = await longest_hold(gate)
        for attack, url in (("wide_bodies", gate.url), ("picker_messages", f"127.0.0.1:{port}")):
            attacker = await Attacker.start(attack, url, gate.model)
            row.count(await attacker.go())
        row.facts["hold_seconds"] = await longest_hold(gate)
        row.facts["not_refused"] = row.sent - row.refused
        row.limits["not_refused"] = 0
        return await gate.serves(row)


async def gateway_bodies(folder: Path) -> Row:
    """Measure a gateway's growth for 24 bodies of 31 MiB that do not end, with other requests."""
    row = Row("flood", "24 bodies of 31 MiB that do not end, at a gateway: memory")
    row.limits["memory_mib"] = 320.0  # 256 of bodies in flight.
    with place(folder) as own, gateway(own, "--max-body", str(BODY)) as gate:
        await all_of(gate.url, [gate.ask(4)])
        process = psutil.Process(gate.server.process.pid)
        before = process.memory_info().rss
        held = await asyncio.gather(*(_unfinished(gate.server.url) for _ in range(24)))
        row.count(await all_of(gate.url, [gate.ask(4)] * 4))
        row.facts["memory_mib"] = round((process.memory_info().rss - before) / 2**20, 1)
        for writer in held:
            writer.close()
        return await gate.serves(row)


async def _unfinished(url: str) -> asyncio.StreamWriter:
    host, port = url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {BODY}\r\n\r\n"
    writer.write(head.encode())
    with contextlib.suppress(ConnectionError):
        for _ in range(31):
            writer.write(b" " * 2**20)
            await writer.drain()
            if reader.at_eof() or writer.is_closing():
                break
    return writer


@contextlib.asynccontextmanager
async def _stand_in(health: list[bytes], answers: bool) -> AsyncIterator[str]:
    """A server that says this of its health, and of everything else the same, or nothing."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = re.search(rb"content-length: (\d+)", head)
                await reader.readexactly(int(size[1]) if size else 0)
                if answers or b" /health " in head:
                    writer.write(health[0])
                elif b"POST" not in head:
                    writer.write(b"HTTP/1.1 404 x\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


OK = b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\ncontent-length: 15\r\n\r\n"


async def silent_server(folder: Path) -> Row:
    """A server behind a gateway that answers probes, takes requests, and says nothing."""
    row = Row("stop", "a server behind a gateway takes requests and says nothing (limit 1 s)")
    health = [OK + b'{"role":"both"}']
    with place(folder) as own:
        async with _stand_in(health, answers=False) as silent:
            flags = ("--policy", "round-robin", "--answer-seconds", "1", "--port", "0")
            with running(headrace("route", own.server.url, silent, *flags)) as server:
                gate = Place(server, own.model, own.folder)
                for _ in range(4):
                    row.count(await all_of(gate.url, [gate.ask(4)] * 2))
                row.facts["refused_beyond_three"] = max(0, row.refused - 3)
                row.limits["refused_beyond_three"] = 0  # Then its circuit is open.
                return await gate.serves(row)


async def lying_server(folder: Path) -> Row:
    """A server behind a gateway whose health is no text, and then bad: it gets nothing more."""
    row = Row("forge", "a server's health is no UTF-8, then 503, behind a gateway")
    health = [OK + b'{"role":"both"}']
    with place(folder) as own:
        async with _stand_in(health, answers=True) as liar:
            flags = ("--policy", "round-robin", "--port", "0")
            with running(headrace("route", own.server.url, liar, *flags)) as server:
                gate = Place(server, own.model, own.folder)
                row.facts["unready_after_seconds"] = 0.0
                row.limits["unready_after_seconds"] = 3.5
                for bad in (
                    OK + b'{"role":"bo\xffh"}',
                    b"HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n",
                ):
                    health[0] = bad
                    begin = time.monotonic()
                    row.facts["still_ready"] = int(not await _unready(gate))
                    took = round(time.monotonic() - begin, 2)
                    row.facts["unready_after_seconds"] = max(
                        took, float(row.facts["unready_after_seconds"])
                    )
                    row.count(await all_of(gate.url, [gate.ask(4)] * 4))
                row.facts["not_answered"] = row.sent - row.answered
                row.limits |= {"still_ready": 0, "not_answered": 0}
                return await gate.serves(row)


async def _unready(gate: Place) -> bool:
    """Wait until the gateway says that its second server is not ready."""
    end = time.monotonic() + LIMIT / 3
    async with httpx.AsyncClient() as client:
        while time.monotonic() < end:
            about = (await client.get(gate.server.url)).json()
            if about["replicas"][1]["state"].startswith("not ready"):
                return True
            await asyncio.sleep(0.05)
    return False


Own = Callable[[Path], Awaitable[Row | None]]
QUICK: dict[str, Own] = {
    "gateway_doors": gateway_doors,
    "gateway_bodies": gateway_bodies,
    "silent_server": silent_server,
    "lying_server": lying_server,
}
"""Faults that CI tries too."""

__all__ = ["QUICK"]
