"""Random traffic with errors, aborts and deaths: memory stays flat and everything is given back.

A few seconds in CI; `HEADRACE_SOAK=1800` makes it half an hour.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from typing import Any

import psutil
import pytest
from engine_fakes import FAKE, RAISE, continuation

from headrace.base.errors import EngineFault, HeadraceError, InvalidRequest
from headrace.base.sampling import SamplingParams
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.supervisor import Supervision

SECONDS = float(os.environ.get("HEADRACE_SOAK", "6"))


@pytest.mark.timeout(SECONDS + 120)
async def test_soak(options: dict[str, Any], supervision: Supervision) -> None:
    draw = random.Random(3)
    own = {**options, "max_sequences": 16, "kv_memory": "1MiB", "step_tokens": 64}
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **own) as engine:
        done = {"right": 0, "left": 0, "refused": 0, "failed": 0}
        deadline = time.monotonic() + SECONDS

        async def reader(seed: int) -> None:
            mine = random.Random(seed)
            while time.monotonic() < deadline:
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
            gc.collect()
            processes = [psutil.Process(), psutil.Process(engine.engine_pid)]
            return [process.memory_info().rss / 2**20 for process in processes]

        readers = [asyncio.create_task(reader(draw.randrange(2**30))) for _ in range(24)]
        await asyncio.sleep(SECONDS / 3)
        early, restarts = memory(), engine.health().restarts
        await asyncio.gather(*readers)
        late = memory()
        assert done["right"] > 20
        assert min(done.values()) > 0
        for before, after in zip(early, late, strict=True):
            if restarts == engine.health().restarts:
                assert after - before < 24, f"{before:.1f} MiB became {after:.1f} MiB"
        for _ in range(100):
            if engine.health().ready:
                break
            await asyncio.sleep(0.05)
        report = await engine.inspect()
        assert (report.running, report.waiting, report.kv_usage) == (0, 0, 0.0)
        assert report.integrity == ""
        assert not engine.in_work()
        print(done, early, late, engine.health().restarts)
