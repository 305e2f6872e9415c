"""What the engine costs around the model: processor time per token in each process.

The worker is the tests' fake one, which computes nothing, so what remains is: schedule, plan,
msgpack over ZeroMQ, detokenise, deliver, metrics. Run: `python benchmarks/engine_overhead.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests" / "engine"


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(streams: int, tokens: int, model: Path) -> dict[str, float]:
    from headrace.base.sampling import SamplingParams
    from headrace.engine.async_engine import AsyncEngine

    async with await AsyncEngine.start(
        model=str(model),
        worker="engine_fakes:load",
        kv_memory="64MiB",
        max_sequences=streams,
        device="cpu",
    ) as engine:
        pid = engine.engine_pid
        assert pid is not None
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        schedule = 0.0
        steps = 0

        def observe(stats: object) -> None:
            nonlocal schedule, steps
            schedule += stats.schedule_seconds  # type: ignore[attr-defined]
            steps += 1

        engine.subscribe(observe)

        async def read(place: int) -> int:
            count = 0
            async for delta in engine.stream([65, place % 256, place // 256], sampling):
                count += len(delta.token_ids)
            return count

        own, other, begin = time.process_time(), processor_seconds(pid), time.perf_counter()
        total = sum(await asyncio.gather(*(read(place) for place in range(streams))))
        seconds = time.perf_counter() - begin
        own, other = time.process_time() - own, processor_seconds(pid) - other
        return {
            "streams": streams,
            "tokens": total,
            "tokens_per_second": round(total / seconds),
            "api_process_us_per_token": round(own / total * 1e6, 1),
            "engine_process_us_per_token": round(other / total * 1e6, 1),
            "schedule_us_per_step": round(schedule / steps * 1e6, 1),
            "steps": steps,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=300)
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from tiny import bytewise

    with tempfile.TemporaryDirectory() as folder:
        model = bytewise.make(Path(folder) / "tiny")
        for streams in arguments.streams:
            print(json.dumps(asyncio.run(measure(streams, arguments.tokens, model))), flush=True)


if __name__ == "__main__":
    main()
