"""What streaming a token costs beside computing it: Headrace's API process, llama-server's threads.

    python benchmarks/server_overhead_peer.py --llama-server PATH [--model FILE.gguf] [--json FILE]

Both serve the same file to the same client: 8 streams of chat, the same tokens each, one thread
that computes. What is counted is CPU time in nanoseconds as the kernel's scheduler counts it
(/proc/PID/task/TID/schedstat), of the side that speaks HTTP:

- Headrace: the whole API process. It tokenises, detokenises, looks for stop strings, meters, makes
  JSON, writes. The engine process is not in it.
- llama-server: every thread but the one that computes. They parse requests, make JSON and write;
  detokenising, stop strings and sampling happen in the thread that computes and are *not* in it,
  so its figure is a lower bound.

The time of a warm-up, and of the prompts, is taken off by measuring two lengths of answer: the
difference of their costs, divided by the difference of their tokens, is the cost of a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "server"))

from processes import headrace, running

STREAMS = 8
LENGTHS = (16, 80)
PROMPT = "Count from one to five hundred in words, separated by commas."


def thread_seconds(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process, to the nanosecond."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def stream(client: httpx.AsyncClient, tokens: int, number: int) -> tuple[int, int]:
    """(events with text, tokens as the server counts them)"""
    body = {
        "messages": [{"role": "user", "content": f"{number}. {PROMPT}"}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events, counted = 0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            value = json.loads(line[6:])
            events += bool(value["choices"] and value["choices"][0]["delta"].get("content"))
            if value.get("usage"):
                counted = value["usage"]["completion_tokens"]
    return events, counted


async def ask(url: str, tokens: int) -> tuple[int, int]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        done = await asyncio.gather(*(stream(client, tokens, one) for one in range(STREAMS)))
    return sum(events for events, _ in done), sum(tokens for _, tokens in done)


def measure(url: str, pid: int, *, without_busiest: bool) -> dict[str, float]:
    """Microseconds of CPU for each token that the longer answers have more."""
    asyncio.run(ask(url, LENGTHS[0]))  # Warm: code, caches, connections, prefix.
    costs, tokens, events, seconds = [], [], [], []
    for length in LENGTHS:
        before, begin = thread_seconds(pid), time.perf_counter()
        seen, counted = asyncio.run(ask(url, length))
        seconds.append(time.perf_counter() - begin)
        after = thread_seconds(pid)
        used = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
        if without_busiest:
            del used[max(used, key=lambda thread: used[thread])]
        costs.append(sum(used.values()))
        tokens.append(counted)
        events.append(seen)
    more = tokens[1] - tokens[0]
    return {
        "cpu_us_per_token": round((costs[1] - costs[0]) / more * 1e6, 1),
        "tokens": more,
        "tokens_per_event": round(more / (events[1] - events[0]), 2),
        "tokens_per_second": round(tokens[1] / seconds[1], 1),
    }


@contextmanager
def llama_server(binary: Path, model: Path) -> Iterator[tuple[str, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(binary),
        "-m",
        str(model),
        "--port",
        str(port),
        "-t",
        "1",
        "-np",
        str(STREAMS),
        "-c",
        str(STREAMS * 512),
        "--no-webui",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "llama-server ended"
            try:
                if httpx.get(url + "/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(20)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--llama-server", type=Path, required=True)
    arguments.add_argument("--model", type=Path, required=True, help="a .gguf file")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    results = {}
    command = headrace(
        "serve",
        str(given.model),
        "--port",
        "0",
        "--threads",
        "1",
        "--log-level",
        "warning",
        "--max-sequences",
        str(STREAMS),
        "--max-context",
        "512",
    )
    with running(command) as server:
        pid = server.process.pid
        results["headrace"] = measure(server.url, pid, without_busiest=False)
        print("headrace", results["headrace"], flush=True)
    with llama_server(given.llama_server, given.model) as (url, pid):
        results["llama-server"] = measure(url, pid, without_busiest=True)
        print("llama-server", results["llama-server"], flush=True)
    if given.json:
        record = {
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "streams": STREAMS,
            "lengths": LENGTHS,
            "model": given.model.name,
            "results": results,
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
