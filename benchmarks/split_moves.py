"""How fast the blocks of a lent prompt come, beside a raw socket on the same machine.

    python benchmarks/split_moves.py [--rounds 7] [--prompt 2048] [--json FILE]

A prefill server in a process of its own computes prompts that the engine here hands over; timed is
from its word that they are lent until the last block was read and its digest held against its
name. `bytes_per_s` are those of KV; the raw socket sends as many to one buffer, nothing looks at
them. The engine is told that each prompt pays, and nothing decodes beside it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

from split import headrace, raw_socket, running

from headrace import LLM, SamplingParams
from headrace.kv.split import SplitChoice
from headrace.server.run import take_port
from headrace.worker.borrowing import Borrowed


class Moves:
    """Looks at what a tier is lent and what is read of it."""

    def __init__(self) -> None:
        self.lent = self.last = 0.0
        self.nbytes = self.blocks = 0
        lend, read = Borrowed._lend, Borrowed.read

        def lending(tier: Borrowed, *given: Any) -> None:
            self.lent, self.nbytes, self.blocks = time.perf_counter(), 0, 0
            lend(tier, *given)

        def reading(tier: Borrowed, *given: Any) -> Any:
            found = read(tier, *given)
            if found is not None:
                self.last = time.perf_counter()
                self.nbytes += len(found)
                self.blocks += 1
            return found

        Borrowed._lend, Borrowed.read = lending, reading  # type: ignore[assignment,method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    SplitChoice.pays = True  # type: ignore[assignment,method-assign]
    moves, draws = Moves(), random.Random(1)
    with take_port("127.0.0.1", 0) as one:
        where = f"tcp://127.0.0.1:{one.getsockname()[1]}"
    flags = ("--threads", "1", "--port", "0", "--max-context", "4096")
    serve = headrace("serve", asked.model, *flags, "--role", f"prefill@{where}")
    found = []
    with (
        running(serve),
        LLM(asked.model, role=f"decode@{where}", threads=1, offline=True, max_context=4096) as llm,
    ):
        time.sleep(2)
        for _ in range(asked.rounds + 1):
            prompt = [draws.randrange(1000, 30_000) for _ in range(asked.prompt)]
            llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
            seconds, raw = moves.last - moves.lent, raw_socket(1 << 27)
            rate = moves.nbytes / seconds if moves.blocks else 0.0
            found.append({"blocks": moves.blocks, "bytes_per_s": rate, "raw_bytes_per_s": raw})
            print(json.dumps(found[-1]), flush=True)
            moves.blocks = 0
    share = statistics.median(one["bytes_per_s"] / one["raw_bytes_per_s"] for one in found[1:])
    report = {
        "machine": platform.processor(),
        "model": asked.model,
        "prompt": asked.prompt,
        "share_of_raw_socket": round(share, 3),
        "rounds": found,
    }
    print("share of a raw socket:", report["share_of_raw_socket"])
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
