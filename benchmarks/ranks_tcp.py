"""Two ranks that meet over TCP, beside what the same link allows: `--launcher env`, layout TP2.

    python benchmarks/ranks_tcp.py [--rounds 7] [--links loopback 1gbit] [--json FILE]

The ceiling of a layout over a link is what its ranks take when they share memory, and for each
exchange what a raw socket takes to carry the same number of bytes both ways at once over that link
(both ends look without sleeping, as ranks do). All are measured in one run, in turns: the ranks of
one thread in memory, the same over the link, the raw sockets. `share` is the ceiling's time over
the time measured.

`loopback` needs nothing. A rate (of `tc`: 1gbit, 10gbit) puts rank 1 into a network namespace
behind a pair of virtual devices with that rate each way, and needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ranks import PROMPT, ROWS, opened, timed

from headrace import LLM, SamplingParams
from headrace.engine.group import GroupExecutor, JoinedRanks

NAME, NET = f"hrt{os.getpid()}", "10.214.55"
MEETINGS = 4
"""Exchanges of a layer; one more of a step's most likely tokens."""


def ip(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def link(rate: str) -> Iterator[tuple[str, list[str]]]:
    """The address of this end, and what begins a command that is to run at the other."""
    if rate == "loopback":
        yield "127.0.0.1", []
        return
    inside = ["ip", "netns", "exec", NAME]
    shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
    ip("ip", "netns", "add", NAME)
    try:
        ip("ip", "link", "add", NAME, "type", "veth", "peer", "name", "eth0", "netns", NAME)
        ip("ip", "addr", "add", f"{NET}.1/24", "dev", NAME)
        ip("ip", "link", "set", NAME, "up")
        ip(*inside, "ip", "addr", "add", f"{NET}.2/24", "dev", "eth0")
        ip(*inside, "ip", "link", "set", "eth0", "up")
        ip(*inside, "ip", "link", "set", "lo", "up")
        ip("tc", "qdisc", "add", "dev", NAME, *shape)
        ip(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)
        yield f"{NET}.1", inside
    finally:
        subprocess.run(["ip", "netns", "del", NAME], check=False)


def swap(end: socket.socket, out: bytes, into: memoryview) -> None:
    """Send all of one and fill the other, at once."""
    sent = got = 0
    while sent < len(out) or got < len(into):
        if sent < len(out):
            with suppress(BlockingIOError):
                sent += end.send(out[sent:] if sent else out)
        if got < len(into):
            with suppress(BlockingIOError):
                got += end.recv_into(into[got:])


def raw_seconds(rate: str, sizes: list[int]) -> list[float]:
    """Seconds of a swap of so many bytes each way, over a connection of this link."""
    with link(rate) as (host, inside), socket.create_server((host, 0)) as door:
        port = door.getsockname()[1]
        words = [str(size) for size in sizes]
        other = [*inside, sys.executable, __file__, "--answer", host, str(port), *words]
        with subprocess.Popen(other) as process:
            end, _ = door.accept()
            found = swaps(end, sizes)
            process.wait()
        return found


def swaps(end: socket.socket, sizes: list[int]) -> list[float]:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setblocking(False)
    found = []
    for size in sizes:
        out, into = bytes(size), memoryview(bytearray(size))
        count = max(20, min(2000, (1 << 27) // size))
        for turn in range(count + 10):
            if turn == 10:
                begin = time.perf_counter()
            swap(end, out, into)
        found.append((time.perf_counter() - begin) / count)
    end.close()
    return found


@contextmanager
def ranks_over(rate: str, model: str, folder: Path) -> Iterator[LLM]:
    key = folder / "key"
    key.write_bytes(b"a key that two hosts share, and no other")
    with link(rate) as (host, inside), socket.create_server((host, 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        said = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
        flags = ["--layout", "TP2", "--launcher", "env", "--rank-key", str(key), "--threads", "1"]
        more = ["--offline", "--max-context", "4096", "--max-sequences", "8", "--port", "0"]
        command = [*inside, "env", *(f"{name}={value}" for name, value in said.items())]
        command += [sys.executable, "-m", "headrace", "serve", model, *flags, *more]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as other:
            os.environ.update(said | {"RANK": "0"})
            try:
                with opened(model, "TP2", 1, launcher="env", rank_key=str(key)) as llm:
                    yield llm
            finally:
                other.terminate()


def carried(llm: LLM) -> int:
    """Bytes that the connection of rank 0's exchanges has carried out, acknowledged."""
    executor = llm._engine.core.executor
    assert isinstance(executor, GroupExecutor)
    assert isinstance(executor._met, JoinedRanks)
    (one,) = executor._met._circle._connections
    info = one.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int.from_bytes(info[120:128], sys.byteorder)


def bytes_of(llm: LLM) -> dict[str, float]:
    """Bytes that rank 0 sends of a prompt, a token, a token of eight sequences."""

    def sent(prompts: list[list[int]], tokens: int) -> int:
        before = carried(llm)
        wish = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        llm.generate(prompts, wish)
        time.sleep(0.1)  # Acknowledged.
        return carried(llm) - before

    draws = random.Random(5)
    whole = [draws.randrange(1000, 30_000) for _ in range(PROMPT)]
    short = [whole[at : at + 16] for at in range(ROWS)]
    return {
        "prompt": sent([whole], 1),
        "token": (sent(short[:1], 33) - sent(short[:1], 1)) / 32,
        "eight": (sent(short, 33) - sent(short, 1)) / 32,
    }


def seconds(llm: LLM, seed: int, kinds: Sequence[str]) -> dict[str, float]:
    """What each kind of work took."""
    return {kind: took for kind, (took, _) in timed(llm, seed, kinds).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--links", nargs="+", default=["loopback", "1gbit"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answer", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.answer:
        host, port, *sizes = asked.answer
        swaps(socket.create_connection((host, int(port))), [int(size) for size in sizes])
        return
    meetings = MEETINGS * asked.layers + 1
    report: dict[str, Any] = {"machine": platform.processor(), "model": asked.model, "links": {}}
    for rate in asked.links:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            shared = stack.enter_context(opened(asked.model, "TP2", 2))
            wired = stack.enter_context(ranks_over(rate, asked.model, folder))
            size = bytes_of(wired)
            rounds = [
                (seconds(shared, seed, list(size)), seconds(wired, seed, list(size)))
                for seed in range(asked.rounds)
            ]
        sizes = [max(1, round(one / meetings)) for one in size.values()]
        raw = dict(zip(size, raw_seconds(rate, sizes), strict=True))
        found = report["links"][rate] = {}
        for kind in size:
            ours = statistics.median(two[kind] for _, two in rounds)
            memory = statistics.median(one[kind] for one, _ in rounds)
            ceilings = [(one[kind] + meetings * raw[kind]) / two[kind] for one, two in rounds]
            found[kind] = {
                "in_memory_ms": round(1e3 * memory, 3),
                "over_the_link_ms": round(1e3 * ours, 3),
                "bytes": round(size[kind]),
                "raw_exchange_us": round(1e6 * raw[kind], 2),
                "ceiling_ms": round(1e3 * (memory + meetings * raw[kind]), 3),
                "share": round(statistics.median(ceilings), 3),
                "least": round(min(ceilings), 3),
                "most": round(max(ceilings), 3),
            }
        print(rate, json.dumps(found), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
