"""Random traffic with errors, aborts and deaths: memory stays flat and everything is given back.

So many requests in CI; `HEADRACE_SOAK=1800` goes on for half an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import time
from typing import Any

import psutil
import pytest
from engine_fakes import FAKE, RAISE, continuation
from engine_waits import until

from headrace.base.errors import EngineFault, HeadraceError, InvalidRequest
from headrace.base.sampling import SamplingParams
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.supervision import Supervision

SECONDS = float(os.environ.get("HEADRACE_SOAK", "0"))
REQUESTS = 1500
"""At least; the figures of the middle are taken after a third of them or of the time."""


@pytest.mark.timeout(SECONDS + 600)
async def test_soak(options: dict[str, Any], supervision: Supervision) -> None:
    draw = random.Random(3)
    own = {**options, "max_sequences": 16, "kv_memory": "1MiB", "step_tokens": 64}
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **own) as engine:
        done = {"right": 0, "left": 0, "refused": 0, "failed": 0}
        begin = time.monotonic()

        def over(share: float) -> bool:
            spent = time.monotonic() - begin
            return sum(done.values()) >= REQUESTS * share and spent >= SECONDS * share

        async def reader(seed: int) -> None:
            mine = random.Random(seed)
            while not over(1.0):
                prompt = [mine.randrange(32, 127) for _ in range(mine.randrange(1, 120))]
                if mine.random() < 0.5:
                    prompt = [64 + place % 50 for place in range(80)] + prompt
                count = mine.randrange(1, 60)
                kind = mine.random()
                sampling = SamplingParams(temperature=0.0, max_tokens=count)
                try:
                    if kind < 0.1:
                        with pytest.raises(InvalidRequest):
                            engine.submit([999], sampling)
                        done["refused"] += 1
                    elif kind < 0.12:
                        with pytest.raises(EngineFault):
                            await engine.generate([*prompt, RAISE], sampling)
                        done["failed"] += 1
                    elif kind < 0.35:
                        stream = engine.submit(prompt, sampling)
                        await asyncio.sleep(mine.random() * 0.02)
                        stream.cancel()
                        done["left"] += 1
                    else:
                        answer = await engine.generate(prompt, sampling)
                        assert answer.outputs[0].token_ids == continuation(prompt, count)
                        done["right"] += 1
                except EngineFault:
                    done["failed"] += 1  # It shared a step with one that raised.
                except HeadraceError:
                    await asyncio.sleep(0.05)  # A restart, after three failures in a row.

        def memory() -> list[float]:
            """MiB that this process holds and, while there is one, the engine's."""
            gc.collect()
            held = [psutil.Process().memory_info().rss / 2**20]
            with contextlib.suppress(psutil.NoSuchProcess):  # It may have died this very moment.
                held.append(psutil.Process(engine.engine_pid).memory_info().rss / 2**20)
            return held

        readers = [asyncio.create_task(reader(draw.randrange(2**30))) for _ in range(24)]
        await until(lambda: over(1 / 3) or any(map(asyncio.Task.done, readers)), "a third", SECONDS)
        early, restarts = memory(), engine.health().restarts
        await asyncio.gather(*readers)
        await until(lambda: engine.health().ready, "ready")
        late = memory()
        assert done["right"] > 20
        assert min(done.values()) > 0
        for before, after in zip(early, late, strict=False):
            if restarts == engine.health().restarts:
                assert after - before < 24, f"{before:.1f} MiB became {after:.1f} MiB"
        report = await engine.inspect()
        for _ in range(5000):  # What was left last is given back after the step.
            if report.running == report.waiting == 0:
                break
            await asyncio.sleep(0.02)
            report = await engine.inspect()
        assert (report.running, report.waiting, report.kv_usage) == (0, 0, 0.0)
        assert report.integrity == ""
        assert not engine.in_work()
        print(done, early, late, engine.health().restarts)
