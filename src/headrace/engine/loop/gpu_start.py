"""One start at a time on a GPU: two servers that start at once would each plan the same free
bytes, and the second would run out of memory."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...base.gpus import GpuFacts

log = logging.getLogger("headrace.engine")

PATIENCE = 600
"""Seconds for which a start waits for another one: any user of the machine may hold the lock."""
LOOK = 0.2
"""Seconds between two tries."""


@contextmanager
def alone_on(gpu: GpuFacts) -> Iterator[None]:
    """Hold the GPU's lock; waits for another start of this host, and says so.

    The kernel drops the lock with the process that held it. The start goes on without it where the
    file cannot be opened (another user's, a read-only system) or locked, and after `PATIENCE`.
    """
    handle = None
    path = Path(tempfile.gettempdir()) / f"headrace-gpu-{gpu.uuid or gpu.index}.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        _wait(handle, gpu.name)
    except OSError as error:
        log.debug("%s: %s; this start does not wait for others", path, error.strerror)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _wait(handle: int, name: str) -> None:
    end, told = time.monotonic() + PATIENCE, False
    while time.monotonic() < end:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                log.info("waiting for another server that starts on %s", name)
                told = True
            time.sleep(LOOK)
    log.warning("another server has been starting on %s for %d s; going on", name, PATIENCE)
