"""One start at a time on a GPU: two servers that start at once would each plan the same free
bytes, and the second would run out of memory."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...base.gpus import GpuFacts

log = logging.getLogger("headrace.engine")


@contextmanager
def alone_on(gpu: GpuFacts) -> Iterator[None]:
    """Hold the GPU's lock; waits for another start of this host, and says so.

    The kernel drops the lock with the process that held it. Where the file cannot be opened
    (another user's, a read-only system) the start goes on without.
    """
    path = Path(tempfile.gettempdir()) / f"headrace-gpu-{gpu.uuid or gpu.index}.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        log.debug("%s: %s; this start does not wait for others", path, error.strerror)
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another server that starts on %s", gpu.name)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
