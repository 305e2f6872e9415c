"""What a decoding step costs beside the program of the kernels, with a real model.

Run: `python benchmarks/step_parts.py [--rows 1 8 32] [--tokens 48] [--json FILE]`.

`gap` is the time between the end of one call into the library and the beginning of the next, of
the whole engine as it serves: loop, scheduler, batch, sampling, text. It is measured first, with
one clock around `Team.run_at` and nothing else, as median and mean. With `--served` the engine
runs in its own process behind its channel, as a server has it, and the readers in this one; there
the time from a request's arrival at an idle engine to its first call is measured as well.

`--parts` then times every part, a method each, from outside, in microseconds per step; parts lie
in one another (`turn` holds all but the output), and the clocks themselves cost two or three
microseconds each. Between two steps the weights have gone through the caches, so all of it runs
cold: the same calls in a loop of their own cost a fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.base.config import DEFAULT_MODEL
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.core import EngineCore
from headrace.engine.executor import LoadedWorker
from headrace.engine.output import Answer, RequestOutputs
from headrace.engine.real import load_worker
from headrace.kernels.cpu.library import Team
from headrace.kernels.cpu.program import CpuProgram
from headrace.kernels.program import CallByCall
from headrace.obs.flight import FlightRecorder
from headrace.sched.scheduler import Scheduler
from headrace.worker.features import Asked
from headrace.worker.host_batch import HostBatches
from headrace.worker.rows import BlockTables, Rows
from headrace.worker.step import Steps
from headrace.worker.worker import Worker

PARTS: tuple[tuple[type, str], ...] = (
    (EngineCore, "turn"),
    (EngineCore, "_expected"),
    (Worker, "launch"),
    (Steps, "launch"),
    (HostBatches, "make"),
    (HostBatches, "decode"),
    (HostBatches, "keep"),
    (CpuProgram, "step"),
    (CallByCall, "step"),
    (Team, "run_at"),
    (Asked, "mask"),
    (Asked, "collect"),
    (Rows, "append"),
    (BlockTables, "write"),
    (Scheduler, "schedule"),
    (Scheduler, "update"),
    (Scheduler, "stats"),
    (FlightRecorder, "submitted"),
    (FlightRecorder, "finished"),
    (RequestOutputs, "feed"),
    (Answer, "add"),
)


GAPS = "HEADRACE_STEP_GAPS"
"""Names the file to which an engine process with `recording_worker` writes its calls."""


ARRIVALS = 15
"""Requests that come to an idle engine, one by one."""


class Calls:
    """When each call into the library began and ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []
        inner, note, clock = Team.run_at, self.spans.append, time.perf_counter

        def run(self: Team, *arguments: Any) -> None:
            begin = clock()
            inner(self, *arguments)
            note((begin, clock()))

        Team.run_at = run  # type: ignore[method-assign]


def recording_worker(files: Any, settings: dict[str, Any]) -> tuple[LoadedWorker, Any]:
    """The real worker, in an engine process that leaves the times of its calls in a file."""
    calls = Calls()
    worker, facts = load_worker(files, settings)
    close = worker.close

    def write_and_close() -> None:
        Path(os.environ[GAPS]).write_text(json.dumps(calls.spans))
        close()

    worker.close = write_and_close  # type: ignore[method-assign]
    return worker, facts


def gaps(spans: list[tuple[float, float]], begin: float, end: float, tokens: int) -> dict[str, Any]:
    """Gaps of the window's steps but the first four: what lies between their calls. A step makes
    one call, or two where the tokens are drawn in one of their own."""
    inside = [span for span in spans if begin <= span[0] and span[1] <= end]
    each = max(1, round(len(inside) / tokens))
    inside = inside[-each * (tokens - 4) :]
    between = [after[0] - before[1] for before, after in itertools.pairwise(inside)]
    whole = inside[-1][1] - inside[0][1]
    calls = [after - before for before, after in inside[1:]]
    return {
        "calls_a_step": each,
        "step_us": round(whole * each / len(between) * 1e6),
        "calls_us": round(sum(calls) * each / len(between) * 1e6),
        "gap_us": round(statistics.median(between) * each * 1e6, 1),
        "gap_mean_us": round(statistics.mean(between) * each * 1e6, 1),
        "gap_share": round(sum(between) / whole, 4),
    }


def sampling(count: int, temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_p=0.9 if temperature else 1.0,
        max_tokens=count,
        ignore_eos=True,
    )


def prompts_of(rows: int, length: int = 16) -> list[list[int]]:
    return [[random.randrange(1_000, 100_000) for _ in range(length)] for _ in range(rows)]


def in_process(
    llm: LLM, calls: Calls, rows: int, tokens: int, temperature: float
) -> dict[str, Any]:
    llm.generate(prompts_of(rows), sampling(4, temperature))
    begin = time.perf_counter()
    llm.generate(prompts_of(rows), sampling(tokens, temperature))
    found = gaps(calls.spans, begin, time.perf_counter(), tokens)
    return {"rows": rows, "temperature": temperature, **found}


async def served(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The same through an engine process."""
    windows, arrived = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[GAPS] = str(Path(folder, "gaps.json"))
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (os.environ.get("PYTHONPATH"), here))
        )
        async with await AsyncEngine.start(
            worker="step_parts:recording_worker",
            model=arguments.model,
            threads=arguments.threads,
            max_sequences=max(arguments.rows),
            max_context=1024,
            kv_memory="200MiB",
            depth=arguments.depth,
        ) as engine:

            async def read(prompt: list[int], params: SamplingParams) -> None:
                async for _ in engine.stream(prompt, params):
                    pass

            for _ in range(ARRIVALS):
                await asyncio.sleep(0.05)
                arrived.append(time.perf_counter())
                await read(prompts_of(1)[0], sampling(1, 0.0))
            for temperature in arguments.temperature:
                for rows in arguments.rows:
                    for count in (4, arguments.tokens):
                        params = sampling(count, temperature)
                        begin = time.perf_counter()
                        await asyncio.gather(*(read(p, params) for p in prompts_of(rows)))
                        end = time.perf_counter()
                    windows.append((rows, temperature, begin, end))
        spans = json.loads(Path(os.environ[GAPS]).read_text())
    waits = [min(span[0] for span in spans if span[0] > at) - at for at in arrived]
    results = [{"served": True, "arrival_to_first_call_us": round(statistics.median(waits) * 1e6)}]
    print(json.dumps(results[-1]), flush=True)
    for rows, temperature, begin, end in windows:
        found = gaps(spans, begin, end, arguments.tokens)
        tokens_a_second = rows * arguments.tokens / (end - begin)
        results.append(
            {
                "rows": rows,
                "temperature": temperature,
                "served": True,
                **found,
                "tokens_per_second": round(tokens_a_second, 1),
            }
        )
        print(json.dumps(results[-1]), flush=True)
    return results


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


def parts(llm: LLM, watch: Watch, rows: int, tokens: int, temperature: float) -> dict[str, Any]:
    """One batch of `rows` short prompts, decoded for `tokens` steps."""
    llm.generate(prompts_of(rows), sampling(4, temperature))
    watch.clear()
    begin = time.perf_counter()
    llm.generate(prompts_of(rows), sampling(tokens, temperature))
    seconds = time.perf_counter() - begin
    steps = watch.calls["EngineCore.turn"]
    found = sorted(watch.seconds.items(), key=lambda part: -part[1])
    return {
        "rows": rows,
        "temperature": temperature,
        "timed_step_us": round(seconds / steps * 1e6),
        "parts_us": {name: round(spent / steps * 1e6, 1) for name, spent in found},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.7])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--served", action="store_true", help="through an engine process")
    parser.add_argument("--parts", action="store_true", help="time every part as well")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    cases = [(rows, heat) for heat in arguments.temperature for rows in arguments.rows]
    if arguments.served:
        results += asyncio.run(served(arguments))
    else:
        calls = Calls()
        with LLM(
            arguments.model,
            threads=arguments.threads,
            max_sequences=max(arguments.rows),
            max_context=1024,
            kv_memory="200MiB",
            depth=arguments.depth,
            speculate="off",
        ) as llm:
            for rows, heat in cases:
                results.append(in_process(llm, calls, rows, arguments.tokens, heat))
                print(json.dumps(results[-1]), flush=True)
            if arguments.parts:
                watch = Watch()
                for rows, heat in cases:
                    results.append(parts(llm, watch, rows, arguments.tokens, heat))
                    print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
