"""What `headrace route` adds to a server's answers: time to the first token, tokens a second.

    python benchmarks/route_overhead.py [--rounds 5] [--streams 8] [--tokens 128] [--json FILE]

Each round asks the server itself and asks through a gateway, in turns, over connections that stay
open. First tokens come from the bench's mock server, which answers at once, so that only the path
is measured; tokens a second from a server with the default model, whose cores the gateway takes its
share of, as it would on one host. `cpu_us_per_token` is the gateway's own processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "server"))

import httpx
from processes import headrace, running

ASKED = 400
"""First tokens a round and way."""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def first_tokens(url: str, client: httpx.Client) -> list[float]:
    """Milliseconds from a request to the first byte of its stream, one after the other."""
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
    found = []
    for _ in range(ASKED):
        begin = time.perf_counter()
        with client.stream(
            "POST", f"{url}/v1/chat/completions", json=body | {"stream": True, "max_tokens": 1}
        ) as reply:
            parts = reply.iter_raw()
            next(parts)
            found.append((time.perf_counter() - begin) * 1e3)
            for _ in parts:
                pass
    return found


async def throughput(url: str, model: str, streams: int, tokens: int) -> float:
    """Tokens a second of all streams together."""
    async with httpx.AsyncClient(timeout=600) as client:

        async def one(number: int) -> int:
            body = {
                "model": model,
                "prompt": f"# part {number}\n",
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
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


def spread(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"median": round(statistics.median(values), 4), "p99": round(cuts[98], 4)}


def measured_first(rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"direct": [], "routed": []}
    with subprocess.Popen(
        headrace("bench", "mock", "--port", "0", "--ttft", "0", "--itl", "0"),
        stdout=subprocess.PIPE,
        text=True,
    ) as mock:
        assert mock.stdout is not None
        url = mock.stdout.readline().strip()
        with running(headrace("route", url, "--port", "0")) as gateway, httpx.Client() as client:
            for _ in range(rounds + 1):
                for way, base in (("direct", url), ("routed", gateway.url)):
                    found[way] += first_tokens(base, client)
        mock.terminate()
    # The first round warms both ways up.
    kept = {way: spread(values[ASKED:]) for way, values in found.items()}
    return kept | {"added_ms": round(kept["routed"]["median"] - kept["direct"]["median"], 4)}


def measured_throughput(model: str, rounds: int, streams: int, tokens: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"direct": [], "routed": []}
    with (
        running(headrace("serve", model, "--port", "0")) as server,
        running(headrace("route", server.url, "--port", "0")) as gateway,
    ):
        used = 0.0
        asyncio.run(throughput(gateway.url, model, streams, 16))
        for _ in range(rounds):
            for way, base in (("direct", server.url), ("routed", gateway.url)):
                before = cpu_seconds(gateway.process.pid)
                found[way].append(asyncio.run(throughput(base, model, streams, tokens)))
                used += (cpu_seconds(gateway.process.pid) - before) * (way == "routed")
    ratios = [
        routed / direct for routed, direct in zip(found["routed"], found["direct"], strict=True)
    ]
    return {way: [round(value, 1) for value in values] for way, values in found.items()} | {
        "ratio_median": round(statistics.median(ratios), 4),
        "cpu_us_per_token": round(used / (rounds * streams * tokens) * 1e6, 1),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--model", default="qwen2.5-coder-0.5b")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--streams", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=128)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    first = measured_first(given.rounds)
    print("first token, ms:", first)
    carried = measured_throughput(given.model, given.rounds, given.streams, given.tokens)
    print("tokens a second:", carried)
    if given.json:
        about = {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "streams": given.streams,
            "tokens": given.tokens,
        }
        record = about | {"first_token_ms": first, "tokens_per_second": carried}
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
