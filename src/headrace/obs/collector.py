"""Full garbage collections while no request waits.

A collection of the oldest generation visits every object of the process and blocks its event loop:
once for 90 ms, in a server under very large bodies. Younger generations have short collections and
are left to the interpreter.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

LOOK = 5.0
"""Seconds between two checks whether a request waits."""
LONGEST = 300.0
"""Seconds after which garbage is collected despite waiting requests, to bound its growth."""
_NEVER = 1 << 30


async def collect_when_idle(busy: Callable[[], bool]) -> None:
    """Collect the oldest generation in place of the interpreter, until cancelled.

    `busy` returns whether a client awaits an answer.
    """
    usual = gc.get_threshold()
    gc.set_threshold(usual[0], usual[1], _NEVER)
    latest = time.monotonic()
    try:
        while True:
            await asyncio.sleep(LOOK)
            if not busy() or time.monotonic() - latest >= LONGEST:
                gc.collect()
                latest = time.monotonic()
    finally:
        gc.set_threshold(*usual)
