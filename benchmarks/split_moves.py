"""How fast the blocks of a lent prompt come, beside what the same machine can move at all.

    python benchmarks/split_moves.py [--rounds 7] [--prompt 2048] [--key] [--json FILE]

A prefill server in a process of its own computes prompts that the engine here hands over, and their
blocks come in turns by a socket and out of its memory, as if the servers were two hosts or one.
Timed is from its word that they are lent until the last block is where it is wanted and known to be
the one of its name. The limits of the same minute: a raw socket that sends to one buffer which
nobody looks at, and a copy of as many bytes. With `--key` what goes through the socket is
encrypted. The engine is told that each prompt pays, and nothing decodes beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from split import headrace, raw_socket, running

from headrace import LLM, SamplingParams
from headrace.base.hardware import cpu
from headrace.kv.split import SplitChoice
from headrace.server.run import take_port
from headrace.worker import borrowing
from headrace.worker.borrowing import Borrowed

WAYS = "socket", "memory"


class Moves:
    """Says by which way blocks come, and looks at when they do."""

    def __init__(self) -> None:
        self.way = ""
        self.lent = self.began = self.last = 0.0
        self.nbytes = self.blocks = 0
        lend, bring, open_line = Borrowed._lend, Borrowed.bring, borrowing.open_line

        def lending(tier: Borrowed, *given: Any) -> None:
            self.lent, self.began, self.nbytes, self.blocks = time.perf_counter(), 0.0, 0, 0
            lend(tier, *given)

        def bringing(tier: Borrowed, pieces: Any, places: Any, ready: Any) -> list[bool]:
            self.began = self.began or time.perf_counter()
            found = bring(tier, pieces, places, ready)
            self.last = time.perf_counter()
            for piece, good in zip(pieces, found, strict=True):
                self.nbytes += good * places[piece.group].nbytes
                self.blocks += good
            return found

        def opening(address: str, welcome: Any, *given: Any) -> Any:
            near = welcome.near if self.way == "memory" else ""
            line = open_line(address, msgspec.structs.replace(welcome, near=near), *given)
            assert (line.pool is not None) == (self.way == "memory")
            return line

        Borrowed._lend, Borrowed.bring = lending, bringing  # type: ignore[method-assign]
        borrowing.open_line = opening

    def go(self, llm: LLM, way: str) -> None:
        """From now on by this way."""
        self.way, self.blocks = way, 0
        borrowed: Any = llm._built.context.tiers.handovers._servers  # type: ignore[union-attr]
        with borrowed._lock:
            for server in borrowed._servers:
                for line in server.lines:
                    line.close()
                server.lines.clear()


def copies(nbytes: int) -> float:
    """Bytes a second of a copy of as many, the better of several."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        target[:] = source
        found.append(nbytes / (time.perf_counter() - begin))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--key", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    SplitChoice.pays = True  # type: ignore[assignment,method-assign]
    moves, draws = Moves(), random.Random(1)
    with take_port("127.0.0.1", 0) as one:
        where = f"tcp://127.0.0.1:{one.getsockname()[1]}"
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    flags = ("--threads", "1", "--port", "0", "--max-context", "4096")
    with tempfile.TemporaryDirectory() as folder:
        if asked.key:
            key = Path(folder) / "key"
            key.write_bytes(draws.randbytes(32).hex().encode())
            where += f"?key={key}"
        serve = headrace("serve", asked.model, *flags, "--role", f"prefill@{where}")
        with (
            running(serve),
            LLM(
                asked.model, role=f"decode@{where}", threads=1, offline=True, max_context=4096
            ) as llm,
        ):
            time.sleep(2)
            for number in range(2 * (asked.rounds + 1)):
                way = WAYS[number % 2]
                moves.go(llm, way)
                prompt = [draws.randrange(1000, 30_000) for _ in range(asked.prompt)]
                llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
                if not moves.blocks:
                    continue  # A server that others held up for seconds counts as gone.
                limit = raw_socket(1 << 27) if way == "socket" else copies(moves.nbytes)
                rate = moves.nbytes / (moves.last - moves.lent)
                moving = moves.nbytes / (moves.last - moves.began)
                one_round = {
                    "blocks": moves.blocks,
                    "bytes_per_s": rate,
                    "moving_bytes_per_s": moving,
                    "limit_bytes_per_s": limit,
                }
                found[way].append(one_round)
                print(way, json.dumps(one_round), flush=True)
    report: dict[str, Any] = {
        "machine": cpu().name,
        "model": asked.model,
        "prompt": asked.prompt,
        "encrypted": asked.key,
    }
    for way, rounds in found.items():
        for name in ("bytes_per_s", "moving_bytes_per_s"):
            share = statistics.median(one[name] / one["limit_bytes_per_s"] for one in rounds[1:])
            report[f"{way}_share" + "_moving" * (name != "bytes_per_s")] = round(share, 3)
    print(json.dumps(report))
    if asked.json:
        asked.json.write_text(json.dumps(report | {"rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
