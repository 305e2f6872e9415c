"""Attacks on a server, in a process of their own.

    python attacks.py NAME URL MODEL

prints the outcome of every request that was sent, as JSON. A separate process, so that the time
which an attack costs its sender does not count as the time that it costs others.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fault_client import LOST, REFUSED, all_of, http

LIMIT = 600.0
"""Seconds after which an attack is given up."""


def asking(model: str, tokens: int = 20, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    """The body of an ordinary request."""
    return {
        "model": model,
        "prompt": "The headrace",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **more,
    }


def huge_schema(number: int) -> dict[str, Any]:
    """At the bounds of what is compiled and can be served; another one for every `number`. Larger
    objects are refused with the first token: more than 2,000 of its names could come next."""
    names = [f"p{number}_{place}" for place in range(2000)]
    objects = [names[first : first + 200] for first in range(0, 2000, 200)]
    return {
        "type": "array",
        "prefixItems": [
            {"type": "object", "properties": {name: {"type": "string"} for name in each}}
            for each in objects
        ],
    }


def formed(model: str, schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    return asking(model, 40, stream=False, response_format=form, ignore_eos=False)


def hostile_bodies(model: str) -> list[bytes]:
    """Bodies that ask for much with little."""
    head = b'{"model":"%s","prompt":"a","max_tokens":2,' % model.encode()
    deep = 100_000
    return [
        head + b'"metadata":' + b"[" * deep + b"]" * deep + b"}",
        head + b'"metadata":[' + b"[]," * 900_000 + b"[]]}",
        head + b'"chat_template_kwargs":{"a":[' + b"[]," * 900_000 + b"[]]}}",
        head + b'"seed":' + b"9" * 100_000 + b"}",
        head + b'"temperature":1e999}',
        head + b'"temperature":NaN}',
        head + b'"stop":["\\ud800"]}',
        head + b'"stop_token_ids":[' + b"1," * 500_000 + b"1]}",
        head + b'"logit_bias":{' + b",".join(b'"%d":1' % n for n in range(100_000)) + b"}}",
        head + b'"stop":[' + b'"a",' * 500_000 + b'"a"]}',
        head[:-1] + b"\xff\xfe}",
        b"[" * deep,
        b'{"a":' * deep,
        b'"' + b"a" * 3_000_000,
        b"",
        b"null",
    ]


def heavy_bodies(model: str) -> list[bytes]:
    """The dearest that are parsed, each just below a bound of `base.weight`."""
    head = b'{"model":"%s","max_tokens":2,' % model.encode()
    return [
        head + b'"prompt":"a","metadata":[' + b"[]," * 10_000 + b"[]]}",
        head
        + b'"prompt":"a","unknown":{'
        + b",".join(b'"k%d":1' % n for n in range(32_000))
        + b"}}",
        head + b'"prompt":[' + b"1," * 380_000 + b"1]}",
        head + b'"prompt":"' + b"\\u00e9" * 600_000 + b'"}',
        head + b'"prompt":"' + b"a" * 65_000 + b'"}',
        head + b'"prompt":"' + b"The headrace. " * 250_000 + b'"}',
        head + b'"messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 10_000) + b"]}",
        json.dumps(formed(model, huge_schema(0))).encode(),
    ]


async def forged_bodies(url: str, model: str) -> list[str]:
    """Four at once."""
    bodies = hostile_bodies(model)
    ends: list[str] = []
    for first in range(0, len(bodies), 4):
        ends += await all_of(url, bodies[first : first + 4])
    return ends


async def heavy(url: str, model: str) -> list[str]:
    """One after the other, to the route of completions and to that of chats."""
    ends: list[str] = []
    for body in heavy_bodies(model):
        chat = url.replace("/completions", "/chat/completions")
        ends += await all_of(chat if b'"messages"' in body else url, [body])
    return ends


async def abandoned_schemas(url: str, model: str) -> list[str]:
    """Eight huge ones, whose clients leave before they can be compiled."""
    async with http() as client:
        tasks = [
            asyncio.create_task(client.post(url, json=formed(model, huge_schema(number))))
            for number in range(8)
        ]
        await asyncio.sleep(0.6)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return []


async def idle_connections(url: str, model: str) -> list[str]:
    """700, silent or a byte at a time, for four seconds."""
    host, port = url.split("/")[2].split(":")
    pairs = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(700)))
    for number, (_, writer) in enumerate(pairs):
        if number % 3 == 0:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    for _ in range(20):
        for number, (_, writer) in enumerate(pairs):
            if number % 3 == 0 and not writer.is_closing():
                writer.write(b"a")
        await asyncio.sleep(0.2)
    for _, writer in pairs:
        writer.close()
    return []


WIDE = 30 * 2**20


async def wide_bodies(url: str, model: str) -> list[str]:
    """Bodies of 30 and of 4 MiB, one after the other: texts, and what is dear to parse."""
    head = b'{"model":"%s","stream":true,"prompt":' % model.encode()
    ends: list[str] = []
    for size in (WIDE, 2**22 - 2**10):
        for body in (
            head + b'"' + b"a" * size + b'"}',
            head + b'"' + b"\\u0041" * (size // 6) + b'"}',
            head + b"[" + b"[]," * (size // 3) + b"0]}",
            head + b"[" + b"1," * (size // 2) + b"0]}",
            head + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
            head + b"0" + b"".join(b',"%d":0' % number for number in range(size // 12)) + b"}",
        ):
            ends += await all_of(url, [body])
    return ends


async def picker_messages(url: str, model: str) -> list[str]:
    """Messages to an endpoint picker: fields of a byte, and headers without a name, 30 MiB in one
    message and in many."""
    import grpc  # Local: an extra.

    def sized(field: int, data: bytes) -> bytes:
        size, number = b"", len(data)
        while number > 127:
            size, number = size + bytes([number & 127 | 128]), number >> 7
        return bytes([field << 3 | 2]) + size + bytes([number]) + data

    def fields(size: int) -> bytes:
        return b"\x78\x00" * (size // 2)

    def headers(size: int) -> bytes:
        return sized(2, sized(1, b"\x0a\x04\x0a\x00\x1a\x00" * (size // 6)))

    async def ask(channel: Any, message: bytes) -> str:
        stream = channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")()
        try:
            await stream.write(message)
            said: bytes = await stream.read()
        except grpc.aio.AioRpcError:
            return REFUSED
        return REFUSED if said[:1] == b"\x3a" else LOST  # The field of an answer in place of ours.

    options = [("grpc.max_send_message_length", -1)]
    ends: list[str] = []
    async with grpc.aio.insecure_channel(url, options=options) as channel:
        for made in (fields, headers):
            ends.append(await ask(channel, made(WIDE)))
            many = [made(2**20) for _ in range(30)]
            ends += await asyncio.gather(*(ask(channel, one) for one in many))
    return ends


Attack = Callable[[str, str], Awaitable[list[str]]]
ATTACKS: dict[str, Attack] = {
    each.__name__: each
    for each in (
        forged_bodies,
        heavy,
        abandoned_schemas,
        idle_connections,
        wide_bodies,
        picker_messages,
    )
}


class Attacker:
    """The process of one attack. It is up when `start` returns, and begins with `go`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, name: str, url: str, model: str) -> Attacker:
        assert name in ATTACKS, name
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__)), name, url, model, stdin=pipe, stdout=pipe
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        return cls(process)

    async def go(self) -> list[str]:
        """Attack, to the end; the outcomes of what was sent."""
        try:
            out, _ = await asyncio.wait_for(self._process.communicate(b"go\n"), LIMIT)
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
        ends: list[str] = json.loads(out)
        return ends


def main() -> None:
    name, url, model = sys.argv[1:]
    print("up", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(_run(ATTACKS[name], url, model))))


async def _run(attack: Attack, url: str, model: str) -> list[str]:
    return await attack(url, model)


if __name__ == "__main__":
    main()
