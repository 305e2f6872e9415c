"""The watch over an event loop tells code that holds it from a machine without a free core."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.obs.loopwatch import waited_for_core

WATCHED = """
import asyncio, logging, os, sys, time
from headrace.obs.loopwatch import LoopWatch

class Said(logging.Handler):
    def emit(self, record):
        if record.at.startswith(sys.argv[3]):
            os._exit(0)

logging.getLogger("headrace.loop").addHandler(Said())

async def run():
    watch = LoopWatch()
    watch.start()
    await asyncio.sleep(0.2)
    while sys.argv[1] == "code":
        time.sleep(0.6)
        await asyncio.sleep(0.2)
    else:
        os.sched_setaffinity(0, {int(sys.argv[2])})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    await asyncio.sleep(60)

asyncio.run(run())
"""
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts waits for a core")
@pytest.mark.parametrize("held_by", ["code", "nobody"])
def test_a_loop_that_waits_for_a_core_is_held_by_nobody(held_by: str) -> None:
    if not waited_for_core():
        pytest.skip("this kernel counts no waits for a core")
    core = str(min(os.sched_getaffinity(0)))
    expected = "no code: it waited for a core" if held_by == "nobody" else 'File "<string>"'
    count = 2 if held_by == "nobody" else 0
    others = [subprocess.Popen([sys.executable, "-c", BUSY, core]) for _ in range(count)]
    try:
        watched = [sys.executable, "-c", WATCHED, held_by, core, expected]
        subprocess.run(watched, check=True, timeout=240)
    finally:
        for one in others:
            one.kill()
            one.wait()
