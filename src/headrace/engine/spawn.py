"""Child processes that live and die with their parent.

A child is a fresh interpreter (never a fork of threads and sockets) in a session of its own, so
that Ctrl-C in the terminal reaches the parent alone, which then drains. Its standard input is a
pipe that only the parent holds: when the parent ends, however it ends, the child reads the end of
the pipe and leaves. Where the kernel can, it also ends a child whose Python is locked up.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ..base.environment import with_packages

STACKS = "stacks.txt"
"""File in a child's folder that takes its stacks: on a crash, and when it is asked by a signal."""
DUMP_SIGNAL = signal.SIGUSR1
PR_SET_PDEATHSIG = 1
ORPHANED = 74
"""Exit code of a child whose parent is gone."""


class Child:
    """A running child process, as its parent sees it."""

    def __init__(self, module: str, arguments: list[str], keep: Sequence[int] = ()) -> None:
        """Start `python -m module arguments… --spawned T`, T being the monotonic clock of now.
        It gets the descriptors `keep` by their numbers."""
        # The kernel's signal follows the thread that spawned; only the main one lives as long as
        # the process.
        bound = threading.current_thread() is threading.main_thread()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                module,
                *arguments,
                *(["--bound"] if bound else []),
                "--spawned",
                repr(time.monotonic()),
            ],
            stdin=subprocess.PIPE,
            pass_fds=keep,
            start_new_session=True,
            env=with_packages(sys.path),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def watch(self, on_exit: Callable[[int], None]) -> None:
        """Call back, from a thread of its own, with the exit code as soon as it ends."""

        def wait() -> None:
            on_exit(self._process.wait())

        thread = threading.Thread(target=wait, name=f"headrace-wait-{self.pid}", daemon=True)
        # Without a thread its end is seen all the same, when its exit code is next asked for.
        with contextlib.suppress(RuntimeError):
            thread.start()

    def wait(self, timeout: float) -> int | None:
        """The exit code, or None when it still runs after `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def ask_for_stacks(self) -> None:
        """Make it write its threads' stacks and then end; works also while it hangs in C code."""
        with contextlib.suppress(OSError):
            self._process.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()

    def release(self) -> None:
        """Close the life line: a child that did not leave by itself leaves now."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def explain_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    if -code == signal.SIGBUS:
        return "was ended by SIGBUS: a file that it had mapped was cut, or its disk failed"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def become_child(folder: Path, *, bound: bool) -> IO[str]:
    """Called first in a child: ignore the terminal, follow the parent, be ready to show stacks.

    `bound`: the kernel may tie this process to the thread that spawned it. Returns the file of
    the stacks, which has to stay open.
    """
    if bound and sys.platform == "linux":
        # For a child that hangs with the interpreter locked, where the thread below cannot run.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks = (folder / STACKS).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True, chain=True)  # Then it ends by it.
    threading.Thread(target=_follow_parent, name="headrace-lifeline", daemon=True).start()
    return stacks


def _follow_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(ORPHANED)
