"""Real servers behind a real gateway: one of two is killed under 64 streams."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest

from tiny import talker
from tiny.kept import Kept

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import api_pid, headrace, kill, running

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
STREAMS, TOKENS = 64, 400


def body(model: str, number: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": f"{number}: a river",
        "seed": number,
        "temperature": 1.0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }


async def told(
    client: httpx.AsyncClient, url: str, asked: dict[str, object], begun: asyncio.Semaphore
) -> tuple[str, str, bool]:
    """Text, finish reason and whether the end mark came, of one stream."""
    text, finish, ended, first = "", "", False, True
    async with client.stream("POST", url + "/v1/completions", json=asked) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            ended = ended or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            value = json.loads(line[6:])
            assert "error" not in value, value
            for choice in value["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
            if first and text:
                first = False
                begun.release()
    return text, finish, ended


async def test_a_killed_server_loses_and_repeats_nothing(kept: Kept) -> None:
    """The answers are those of one server that was left alone, character by character."""
    model = kept(talker.make)
    flags = ("--port", "0", "--threads", "1", "--kernels", "ref")
    command = headrace("serve", str(model), *flags)
    limits = httpx.Limits(max_connections=None)
    with running(command) as one, running(command) as two:
        route = headrace("route", one.url, two.url, "--port", "0", "--policy", "least-loaded")
        with running(route) as gate:
            async with httpx.AsyncClient(limits=limits, timeout=300) as client:
                asked = [body(model.name, number) for number in range(STREAMS)]
                begun = asyncio.Semaphore(0)
                streams = [
                    asyncio.ensure_future(told(client, gate.url, each, begun)) for each in asked
                ]
                async with asyncio.timeout(60):
                    for _ in range(STREAMS):
                        await begun.acquire()
                assert sum(not stream.done() for stream in streams) > STREAMS // 2
                await asyncio.to_thread(kill, api_pid(one))
                found = await asyncio.gather(*streams)
                metrics = (await client.get(gate.url + "/metrics")).text
                wanted = [await told(client, two.url, each, asyncio.Semaphore(0)) for each in asked]
    assert found == wanted
    assert all(ended and finish == "length" for _, finish, ended in found)
    moved = [line for line in metrics.splitlines() if line.startswith("headrace_route_migrations_")]
    assert f'{{replica="{two.url}"}} 0.0' not in "".join(moved), "streams went on at the other"
    print("\n".join(moved))
