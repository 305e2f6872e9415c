"""Two servers of one thread: one prefills for the other (`--role`), beside two that do both.

    python benchmarks/split.py [--rounds 3] [--streams 4] [--prompt 1024] [--json FILE]

Both pairs stand behind a router and are asked in turns, by the same clients: streams that decode
for as long as the round lasts, and long prompts, one every few seconds, no two alike. What is
measured is the time to a long prompt's first token, and the gaps between the streams' tokens. How
fast blocks move is what `split_moves.py` measures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import random
import socket
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "server"))

import httpx
from exposed import metric
from processes import headrace, running

from headrace.server.run import take_port
from ports import two_ports

SETTLE_SECONDS = 2.0
"""Streams alone, before the first long prompt."""


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def told(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> list[float]:
    """When each part of a stream came, as `perf_counter` has it."""
    came = []
    async with client.stream(
        "POST", f"{url}/v1/completions", json=body | {"stream": True}
    ) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith('data: {"') and '"text":' in line:
                came.append(time.perf_counter())
    return came


async def one_round(url: str, model: str, asked: argparse.Namespace, draws: random.Random) -> Any:
    base = {"model": model, "temperature": 0, "ignore_eos": True}
    gaps: list[float] = []
    first: list[float] = []
    tokens = 0
    over = asyncio.Event()
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def decodes() -> None:
            nonlocal tokens
            while not over.is_set():
                body = base | {"prompt": f"# {draws.random()}\n", "max_tokens": 64}
                came = await told(client, url, body)
                tokens += len(came)
                gaps.extend(1e3 * (b - a) for a, b in itertools.pairwise(came))

        async def prompts(number: int) -> None:
            await asyncio.sleep(SETTLE_SECONDS + number * asked.every)
            ids = [draws.randrange(1000, 100_000) for _ in range(asked.prompt)]
            begin = time.perf_counter()
            came = await told(client, url, base | {"prompt": ids, "max_tokens": 16})
            first.append(came[0] - begin)

        begin = time.perf_counter()
        streams = [asyncio.ensure_future(decodes()) for _ in range(asked.streams)]
        await asyncio.gather(*(prompts(number) for number in range(asked.long)))
        over.set()
        await asyncio.gather(*streams)
        seconds = time.perf_counter() - begin
    return {
        "first_token_s": first,
        "gap_p50_ms": quantile(gaps, 0.5),
        "gap_p99_ms": quantile(gaps, 0.99),
        "gap_worst_ms": max(gaps),
        "stream_tokens_per_s": tokens / seconds,
    }


def raw_socket(nbytes: int = 1 << 28, piece: int = 1 << 18) -> float:
    """Bytes a second of a plain loopback connection, received into one buffer."""
    with take_port("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        listener.listen()

        def send() -> None:
            with socket.create_connection(listener.getsockname()) as to:
                data = bytes(piece)
                for _ in range(nbytes // piece):
                    to.sendall(data)

        thread = threading.Thread(target=send)
        thread.start()
        source, _ = listener.accept()
        buffer, got = memoryview(bytearray(piece)), 0
        begin = time.perf_counter()
        while got < nbytes:
            got += source.recv_into(buffer)
        thread.join()
        source.close()
        return nbytes / (time.perf_counter() - begin)


def counted(url: str, name: str, **labels: str) -> float:
    return metric(httpx.get(f"{url}/metrics").text, name, **labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1024, help="Tokens of a long prompt.")
    parser.add_argument("--long", type=int, default=6, help="Long prompts of a round.")
    parser.add_argument("--every", type=float, default=6.0, help="Seconds between two of them.")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    where = f"tcp://127.0.0.1:{two_ports()}"
    with ExitStack() as stack:

        def start(*words: str) -> str:
            return stack.enter_context(running(headrace(*words, "--port", "0"))).url

        serve = ("serve", asked.model, "--threads", "1", "--context-cache", "0")
        prefill, decode = (
            start(*serve, "--role", f"prefill@{where}"),
            start(*serve, "--role", f"decode@{where}"),
        )
        both = [start(*serve), start(*serve)]
        ways = {
            "split": start("route", prefill, decode, "--policy", "least-loaded"),
            "mixed": start("route", *both, "--policy", "least-loaded"),
        }
        until = time.monotonic() + 30
        asyncio.run(told_once(decode, asked.model))
        while counted(decode, "headrace:split_servers") < 1 and time.monotonic() < until:
            asyncio.run(told_once(decode, asked.model))
        found: dict[str, list[Any]] = {way: [] for way in ways}
        for number in range(asked.rounds):
            for way, url in ways.items():
                draws = random.Random(f"{number} {way}")
                found[way].append(asyncio.run(one_round(url, asked.model, asked, draws)))
                print(way, found[way][-1], flush=True)
        counts = {
            "prompts_brought": counted(decode, "headrace:split_prompts_total", end="brought"),
            "lent_bytes": counted(prefill, "headrace:split_lent_bytes_total"),
            "load_seconds": counted(decode, "headrace:context_cache_load_seconds_total"),
        }
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "asked": {
            k: str(v) if isinstance(v, Path) else v for k, v in vars(asked).items() if k != "json"
        },
        "rounds": found,
        "counts": counts,
        "raw_socket_bytes_per_s": raw_socket(),
    }
    for way, rounds in found.items():
        first = [value for one in rounds for value in one["first_token_s"]]
        result[way] = {
            "first_token_median_s": statistics.median(first),
            "first_token_p99_s": quantile(first, 0.99),
            **{
                name: statistics.median(one[name] for one in rounds)
                for name in ("gap_p50_ms", "gap_p99_ms", "gap_worst_ms", "stream_tokens_per_s")
            },
        }
        print(way, json.dumps(result[way]))
    print(json.dumps(counts))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


async def told_once(url: str, model: str) -> None:
    """A step, so that the server's counts are of now."""
    async with httpx.AsyncClient(timeout=60) as client:
        await told(client, url, {"model": model, "prompt": "a", "max_tokens": 2})


if __name__ == "__main__":
    main()
