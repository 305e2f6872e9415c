"""What sleeping gives back, and what waking costs: memory and seconds of a served model.

    python benchmarks/sleep.py [MODEL] [--rounds 3] [--json FILE] [-- OPTION OF serve…]

A server with its engine process serves MODEL (the default model) with `serve`'s defaults. Prompts
that share nothing use its KV pool, which has memory only where it was used; then each round puts
the engine to sleep and wakes it, at level 1 and then at level 2, with one request in between.
Memory is the resident one of the engine process and its children: mapped weights count, though
others may share their pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "server"))

from processes import Running, headrace, running

MODEL = "qwen2.5-coder-0.5b"


def engine_mib(server: Running) -> float:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return sum(child.memory_info().rss for child in children) / 2**20


def ask(server: Running, prompt: list[int], tokens: int) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    httpx.post(server.url + "/v1/completions", json=body, timeout=300).raise_for_status()


def fill(server: Running, sequences: int, length: int) -> None:
    """`sequences` at a time, none of which shares a prefix with another."""
    prompts = [[100 + (i * j + i) % 9000 for j in range(length)] for i in range(1, sequences + 1)]
    with ThreadPoolExecutor(sequences) as pool:
        list(pool.map(lambda prompt: ask(server, prompt, 16), prompts))


def measure(server: Running, boss: str, level: int) -> dict[str, float]:
    awake = engine_mib(server)
    begin = time.monotonic()
    reply = httpx.post(f"{boss}/sleep?level={level}", timeout=60).raise_for_status().json()
    slept, asleep = time.monotonic() - begin, engine_mib(server)
    begin = time.monotonic()
    httpx.post(f"{boss}/wake_up", timeout=300).raise_for_status()
    woken = time.monotonic() - begin
    ask(server, [100, 200, 300], 1)
    return {
        "awake_mib": awake,
        "asleep_mib": asleep,
        "pool_mib": reply.get("kv_bytes", 0) / 2**20,
        "sleep_s": slept,
        "wake_s": woken,
        "first_token_s": time.monotonic() - begin,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=32, help="at a time, to fill the pool")
    parser.add_argument("--length", type=int, default=256, help="tokens of each of them")
    parser.add_argument("--json", type=Path)
    parser.add_argument("serve", nargs="*", help="options of `headrace serve`, behind --")
    given = parser.parse_args()
    command = headrace("serve", given.model, "--port", "0", "--operator-port", "0", *given.serve)
    found: dict[str, list[dict[str, float]]] = {"1": [], "2": []}
    with running(command) as server:
        boss = server.await_line(r"operator: (https?://\S+)").group(1)
        for _ in range(given.rounds):
            fill(server, given.sequences, given.length)
            for level in (1, 2):
                found[str(level)].append(measure(server, boss, level))
    medians = {
        level: {
            name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]
        }
        for level, rounds in found.items()
    }
    for level, one in medians.items():
        print(f"level {level}: " + ", ".join(f"{name} {value:g}" for name, value in one.items()))
    if given.json:
        what: dict[str, Any] = {
            "model": Path(given.model).name,
            "sequences": given.sequences,
            "length": given.length,
            "serve": given.serve,
            "medians": medians,
            "rounds": found,
        }
        given.json.write_text(json.dumps(what, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
