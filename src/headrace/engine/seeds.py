"""Ranks of this host as forks of the engine's process, made right after its imports. They share the
imports and need no interpreter start.

At that moment there is one thread, and only inherited descriptors are open. A fork waits until the
engine names the process it becomes.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

_MOST = 1 << 16
"""Most bytes of arguments."""
_LOOK = 2e-3
"""Seconds between looks at a process whose end is awaited for a while."""
_ABOVE = 512
"""Received descriptors are kept from this number on until each has its own."""
_SHARED = (
    "engine.loop.controls",
    "engine.ranks.layouts",
    "engine.loop.build",
    "worker",
    "engine.ranks.worker_process",
)
"""Modules that ranks share by forking; a fork runs the last one."""
_waiting: list[Seed] = []


class Seed:
    """A forked process, as its parent sees it: the part of `subprocess.Popen` that `spawn.Child`
    needs."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid, self.stdin = pid, line
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with self._lock:
            if self._code is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if ended else None
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        end = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if timeout is None:
                with suppress(ChildProcessError):  # Another thread has reaped it.
                    os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            elif time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout)
            else:
                time.sleep(_LOOK)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def sow(count: int) -> None:
    """Fork `count` processes; `grown` turns them into workers' processes.

    Call it in the main thread of a future engine process, before it starts threads or opens
    anything. Outside Linux nothing is forked, and ranks are started as programs.
    """
    if sys.platform != "linux" or count < 1:
        return
    # By name: an engine with one process imports these after its hello.
    *_, process = [import_module(f"headrace.{name}") for name in _SHARED]
    gc.collect()
    gc.freeze()  # Pages that no collection touches stay shared.
    for _ in range(count):
        line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            for other in _waiting:
                other.stdin.close()
            _waiting.clear()
            line.close()
            process.main(_received(its))
            sys.exit()
        its.close()
        _waiting.append(Seed(pid, line))


def _received(line: socket.socket) -> list[str]:
    """Receive the arguments that make this process a worker; its standard input becomes the life
    line from the engine."""
    os.setsid()
    os.dup2(line.fileno(), 0)
    data, came, _, _ = socket.recv_fds(line, _MOST, 16)
    line.close()
    if not data:
        sys.exit()  # The parent is gone, or does not need it.
    arguments, numbers = json.loads(data)
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for one in came]
    for one in came:
        os.close(one)
    for one, number in zip(high, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)
    return list(arguments)


def grown(module: str, arguments: Sequence[str], keep: Sequence[int]) -> Seed | None:
    """Make a waiting fork run this module with these arguments and the descriptors `keep`, under
    their numbers. Return None if no fork is left."""
    while _waiting and module == f"headrace.{_SHARED[-1]}":
        seed = _waiting.pop(0)
        with suppress(OSError):  # It has been killed.
            socket.send_fds(seed.stdin, [json.dumps([arguments, keep]).encode()], keep)
            return seed
    return None
