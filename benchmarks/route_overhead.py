"""What `headrace route` adds to servers' answers, and an Envoy that asks it for endpoints.

    python benchmarks/route_overhead.py [--rounds 400] [--turns 5] [--json FILE]

Behind all ways stand the same two mock servers of the bench: `direct` asks one of them, `gateway`
goes through `headrace route`, `envoy` through an Envoy that takes turns by itself, and the others
through Envoys that ask the picker of that same `headrace route`: it sees all bodies in full duplex,
or requests buffered and answers as they pass, or no answers.

First tokens: each round asks every way once, over connections that stay open, and servers answer at
once; what is added is the median of the rounds' differences. Tokens a second: streams side by side,
of servers that pause between tokens as an engine would, the ways in turns. `cpu_us_per_token` is
what the process of `headrace route` was busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "server"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "route"))

import httpx
from envoy_process import envoy
from processes import headrace, running

WARM = 50
"""Rounds that are not counted."""
PICKED = {
    "full_duplex": ("FULL_DUPLEX_STREAMED", True),
    "buffered": ("BUFFERED", True),
    "answers_unseen": ("BUFFERED", False),
}
"""How bodies of requests come to the picker, and whether those of answers do."""
BESIDE = {"gateway": "direct", **dict.fromkeys(PICKED, "envoy")}
"""Each way, and what it is measured beside."""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def ways_to(pause: float, policy: str) -> AsyncIterator[tuple[dict[str, str], int]]:
    """Addresses by the names of the ways, and the process of `headrace route`.

    `pause`: seconds between two tokens of a server."""
    async with AsyncExitStack() as stack:
        urls = []
        processes = stack.enter_context(ExitStack())
        for _ in range(2):
            command = headrace("bench", "mock", "--port", "0", "--ttft", "0", "--itl", str(pause))
            mock = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            processes.callback(mock.wait)
            processes.callback(mock.terminate)
            assert mock.stdout is not None
            urls.append(mock.stdout.readline().strip())
        picks = ("--port", "0", "--policy", policy, "--endpoint-picker", "127.0.0.1:0")
        gate = processes.enter_context(running(headrace("route", *urls, *picks)))
        port = int(gate.await_line(r"endpoints are picked on port (\d+)")[1])
        ways = {"direct": urls[0], "gateway": gate.url}
        for name in ("envoy", *PICKED):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            mode, answers = PICKED.get(name, ("BUFFERED", False))
            asks = port if name in PICKED else None
            before = envoy(folder, asks, urls, by="metadata", mode=mode, answers=answers)
            ways[name], _ = await stack.enter_async_context(before)
        yield ways, gate.process.pid


def first_token(url: str, client: httpx.Client) -> float:
    """Milliseconds from a request to the first byte of its stream."""
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
    asked = body | {"stream": True, "max_tokens": 1}
    begin = time.perf_counter()
    with client.stream("POST", f"{url}/v1/chat/completions", json=asked) as reply:
        assert reply.status_code == 200, reply.read()
        parts = reply.iter_raw()
        next(parts)
        taken = (time.perf_counter() - begin) * 1e3
        for _ in parts:
            pass
    return taken


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"median": round(statistics.median(values), 4), "p99": round(cuts[98], 4)}


async def measured_first(rounds: int, policy: str) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    async with ways_to(0, policy) as (ways, _):
        with httpx.Client() as client:
            for turn in range(WARM + rounds):
                for way, url in ways.items():
                    taken = first_token(url, client)
                    if turn >= WARM:
                        found.setdefault(way, []).append(taken)
    added = {
        way: statistics.median(a - b for a, b in zip(found[way], found[beside], strict=True))
        for way, beside in BESIDE.items()
    }
    kept = {way: spread(values) for way, values in found.items()}
    return {**kept, "added_ms": {way: round(value, 4) for way, value in added.items()}}


async def throughput(url: str, streams: int, tokens: int) -> float:
    """Tokens a second of all streams together."""
    async with httpx.AsyncClient(timeout=600) as client:

        async def one(number: int) -> int:
            body = {
                "model": "mock",
                "prompt": f"# part {number}\n",
                "max_tokens": tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            last = b""
            async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
                assert reply.status_code == 200, await reply.aread()
                async for part in reply.aiter_raw():
                    last = (last + part)[-2000:]
            usage = json.loads(last.split(b"data: ")[-2])["usage"]
            return int(usage["completion_tokens"])

        begin = time.perf_counter()
        counts = await asyncio.gather(*(one(number) for number in range(streams)))
        return sum(counts) / (time.perf_counter() - begin)


async def measured_throughput(
    turns: int, streams: int, tokens: int, pause: float, policy: str
) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    used = dict.fromkeys(BESIDE, 0.0)
    async with ways_to(pause, policy) as (ways, pid):
        for turn in range(turns + 1):
            for way, url in ways.items():
                before = cpu_seconds(pid)
                rate = await throughput(url, streams, tokens)
                if turn:
                    found.setdefault(way, []).append(round(rate, 1))
                    if way in used:
                        used[way] += cpu_seconds(pid) - before
    shares = {
        way: statistics.median(a / b for a, b in zip(found[way], found[beside], strict=True))
        for way, beside in BESIDE.items()
    }
    count = turns * streams * tokens
    return {
        **found,
        "ratio_median": {way: round(share, 4) for way, share in shares.items()},
        "cpu_us_per_token": {way: round(spent / count * 1e6, 1) for way, spent in used.items()},
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--rounds", type=int, default=400)
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--streams", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=128)
    arguments.add_argument("--pause", type=float, default=0.02)
    arguments.add_argument("--policy", default="prefix")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    settings = {name: value for name, value in vars(given).items() if name != "json"}
    machine = {"machine": platform.platform(), "python": platform.python_version()}
    first = asyncio.run(measured_first(given.rounds, given.policy))
    print("first token, ms:", first, flush=True)
    rates = measured_throughput(given.turns, given.streams, given.tokens, given.pause, given.policy)
    record = machine | settings | {"first_token_ms": first, "tokens_per_second": asyncio.run(rates)}
    print("tokens a second:", record["tokens_per_second"])
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
