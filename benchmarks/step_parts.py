"""What a decoding step costs beside the program of the kernels, part by part, with a real model.

Run: `python benchmarks/step_parts.py [--rows 1 8 32] [--tokens 48] [--json FILE]`.
Every part is a method timed from outside, in microseconds per step; parts lie in one another
(`turn` holds all but the output). `outside` is the step without `team.run`: the loop, the
scheduler, the batch, sampling, text. Between two steps the weights have gone through the caches,
so all of it runs cold: the same calls in a loop of their own cost a fifth.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.base.config import DEFAULT_MODEL
from headrace.engine.core import EngineCore
from headrace.engine.output import Answer, RequestOutputs
from headrace.kernels.cpu.library import Team
from headrace.obs.flight import FlightRecorder
from headrace.sched.scheduler import Scheduler
from headrace.worker.host_batch import HostBatches
from headrace.worker.rows import BlockTables, Rows
from headrace.worker.runner import Runner
from headrace.worker.sampler import Sampler
from headrace.worker.step import Steps
from headrace.worker.worker import Worker

PARTS: tuple[tuple[type, str], ...] = (
    (EngineCore, "turn"), (EngineCore, "_expected"), (Worker, "launch"), (Steps, "launch"),
    (HostBatches, "make"), (Runner, "run"), (Runner, "greedy"), (Team, "run"), (Sampler, "sample"),
    (Sampler, "most_likely"), (Rows, "append"), (BlockTables, "write"), (Scheduler, "schedule"),
    (Scheduler, "update"), (Scheduler, "stats"), (FlightRecorder, "submitted"),
    (FlightRecorder, "finished"), (RequestOutputs, "feed"), (Answer, "add"),
)  # fmt: skip


class Watch:
    """Adds up the seconds of each part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        for owner, name in PARTS:
            self._wrap(owner, name)

    def _wrap(self, owner: Any, name: str) -> None:
        inner, label = getattr(owner, name), f"{owner.__name__}.{name}"

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                self.seconds[label] += time.perf_counter() - begin
                self.calls[label] += 1

        setattr(owner, name, timed)

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()


def measure(llm: LLM, watch: Watch, rows: int, tokens: int, temperature: float) -> dict[str, Any]:
    """One batch of `rows` short prompts, decoded for `tokens` steps."""

    def run(count: int) -> float:
        params = SamplingParams(
            temperature=temperature, top_p=0.9 if temperature else 1.0, max_tokens=count,
            ignore_eos=True,
        )  # fmt: skip
        prompts = [[random.randrange(1_000, 100_000) for _ in range(16)] for _ in range(rows)]
        watch.clear()
        begin = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - begin

    run(4)
    seconds = run(tokens)
    steps = watch.calls["EngineCore.turn"]
    outside = seconds - watch.seconds["Team.run"]
    parts = sorted(watch.seconds.items(), key=lambda part: -part[1])
    return {
        "rows": rows,
        "temperature": temperature,
        "step_us": round(seconds / steps * 1e6),
        "outside_us": round(outside / steps * 1e6),
        "outside_share": round(outside / seconds, 4),
        "parts_us": {name: round(spent / steps * 1e6, 1) for name, spent in parts},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.7])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch = Watch()
    results = []
    with LLM(
        arguments.model, threads=arguments.threads, max_sequences=max(arguments.rows),
        max_context=1024, kv_memory="200MiB",
    ) as llm:  # fmt: skip
        for temperature in arguments.temperature:
            for rows in arguments.rows:
                results.append(measure(llm, watch, rows, arguments.tokens, temperature))
                print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
