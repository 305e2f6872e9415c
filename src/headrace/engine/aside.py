"""A lower priority for a process that replaces a dead one, until it is ready. So the processes that
serve on the same cores keep them.

If cores are free it starts as fast as ever. It only makes changes that it can undo. An unprivileged
process may not lower its own nice value again. But it may lower that of its session's autogroup,
which Linux has if no cgroup divides the cores.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
from contextlib import suppress
from pathlib import Path

NICE = 10
"""Nice value of a start; next to a serving thread it gets a tenth of a core."""
MOST = 15.0
"""Seconds after which a slow start takes its full share anyway."""
_AGAIN = 0.1
"""Interval at which the system accepts such a change from an unprivileged process."""
_CAP_SYS_NICE = 1 << 23


_standing: list[int] = []
"""The nice value to restore once this process is ready, if it started aside."""
_back = threading.Event()


def nice_of_children(aside: bool) -> int | None:
    """Return the nice value to which a child returns if it starts `aside`, or if this process did.
    None: it starts with normal priority."""
    if sys.platform != "linux" or not (aside or _standing):
        return None
    return _standing[0] if _standing else os.getpriority(os.PRIO_PROCESS, 0)


def step_aside(pid: int, nice: int) -> None:
    """Lower the CPU share of a child, which has its own session, until it returns to this nice
    value."""
    with suppress(OSError):  # It has ended, or there are no autogroups.
        _group(pid, NICE)
    if nice < NICE and _may_return_to(nice):
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, NICE)


def stand_aside(nice: int) -> None:
    """Note that this process was started aside: until it is ready, or for `MOST` seconds."""
    _standing[:] = [nice]
    _later(MOST)


def come_back() -> None:
    """Take the full share again, if this process started aside. From any thread."""
    if not _standing or _back.is_set():
        return
    nice = _standing[0]
    try:
        _group(os.getpid(), 0)
    except OSError as refused:
        if refused.errno == errno.EAGAIN:
            _later(_AGAIN)
            return
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # It has ended.
            if os.getpriority(os.PRIO_PROCESS, thread) == NICE:
                os.setpriority(os.PRIO_PROCESS, thread, nice)
    _back.set()  # Threads that have this nice value later have it for another reason.


def _later(seconds: float) -> None:
    timer = threading.Timer(seconds, come_back)
    timer.daemon = True
    timer.start()


def _group(pid: int, nice: int) -> None:
    if os.getsid(pid) == pid:
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def _may_return_to(nice: int) -> bool:
    """Tell whether this process may have this nice value after a higher one."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - nice:
        return True
    lines = Path("/proc/self/status").read_text().splitlines()
    rights = next(line for line in lines if line.startswith("CapEff:"))
    return bool(int(rights.split()[1], 16) & _CAP_SYS_NICE)
