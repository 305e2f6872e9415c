"""Child processes that live and die with their parent.

A child is a fresh interpreter, or was forked before there were threads and sockets (`seeds`). It
has its own session, so that Ctrl-C in the terminal reaches only the parent, which then drains. Its
standard input is a pipe that only the parent holds. When the parent ends in any way, the child
reads end-of-file and exits. On Linux the kernel also kills a child whose interpreter is stuck.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from ..base.environment import with_packages
from ..dist.pulse import Pulse
from ..obs.threads import THREADS
from .aside import nice_of_children, stand_aside, step_aside
from .seeds import grown

STACKS = "stacks.txt"
"""File in a child's folder for its stacks: on a crash, and on `DUMP_SIGNAL`."""
DUMP_SIGNAL = signal.SIGUSR1
PR_SET_PDEATHSIG = 1
_IMPORTS = 600.0
"""Most seconds until a child's first sign of life, on a busy machine."""
ORPHANED = 74
"""Exit code of a child whose parent is gone."""
_pulses: list[Pulse] = []
"""This process's pulse to its parent, if any."""


class Child:
    """A running child process, as its parent sees it."""

    silence = ""
    """Reason, as the end of a sentence, if it was killed for its silence."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        keep: Sequence[int] = (),
        silent: float | None = None,
        on_word: Callable[[str], None] = lambda word: None,
        aside: bool = False,
    ) -> None:
        """Start `python -m module arguments… --spawned T`, where T is the monotonic clock now.

        It inherits the descriptors `keep` under their numbers. `silent`: seconds without a sign of
        life after which it is killed, for a child that calls `become_child` with `--pulse`.
        `on_word` is called from a thread with messages of `tell_parent`. `aside`: it and its own
        children run at lower priority until it is ready.
        """
        mine, its = socket.socketpair() if silent is not None else (None, None)
        if its is not None:
            keep, arguments = [*keep, its.fileno()], [*arguments, "--pulse", str(its.fileno())]
        nice = nice_of_children(aside)
        if nice is not None:
            arguments = [*arguments, "--aside", str(nice)]
        # The kernel's signal follows the spawning thread; only the main one lives as long as the
        # process.
        bound = threading.current_thread() is threading.main_thread()
        arguments = [*arguments, *(["--bound"] if bound else []), "--spawned"]
        arguments.append(repr(time.monotonic()))
        self._process = grown(module, arguments, keep) or subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            pass_fds=keep,
            start_new_session=True,
            env=with_packages(sys.path),
        )
        if nice is not None:
            step_aside(self.pid, nice)
        self._pulse: Pulse | None = None
        if mine is not None and its is not None and silent is not None:
            its.close()
            self._pulse = Pulse(
                {"": mine},
                lambda _, why: self._lost(why),
                silent=silent,
                begins=_IMPORTS,
                on_word=lambda _, word: on_word(word),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def how(self, code: int) -> str:
        """Return the end with this exit code, in words."""
        return self.silence or explain_exit(code)

    def _lost(self, why: str) -> None:
        """Kill it: it is stopped, hangs with the interpreter locked, or is ending by itself."""
        if self.wait(0.5) is None:
            self.silence = f"{why} and was ended"
            self.kill()

    def watch(self, on_exit: Callable[[int], None]) -> None:
        """Call back, from a thread of its own, with the exit code as soon as it ends."""

        def wait() -> None:
            on_exit(self._process.wait())

        # Without a thread its end is still noticed when its exit code is next read.
        THREADS.errand("wait", wait)

    def wait(self, timeout: float) -> int | None:
        """Return the exit code, or None if it still runs after `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def ask_for_stacks(self) -> None:
        """Make it write its threads' stacks and then end; works even if it hangs in C code."""
        with contextlib.suppress(OSError):
            self._process.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()

    def release(self) -> None:
        """Close the life line: a child that still runs exits now."""
        if self._pulse is not None:
            self._pulse.close()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def explain_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    if -code == signal.SIGBUS:
        return "was ended by SIGBUS: a file that it had mapped was cut, or its disk failed"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def take_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every child takes."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bound", action="store_true", help="die with the spawning thread")
    parser.add_argument("--spawned", type=float, default=time.monotonic())
    parser.add_argument("--aside", type=int, help="it starts aside; its nice value otherwise")
    parser.add_argument("--pulse", type=int, help="a socket on which it is to say that it lives")


def become_child(arguments: argparse.Namespace) -> IO[str]:
    """Set up a child process; called first, with the arguments of `take_arguments`. It ignores
    Ctrl-C, ends with the parent and can write its stacks. Returns the stacks' file, which must stay
    open."""
    if arguments.aside is not None:
        stand_aside(arguments.aside)
    if arguments.pulse is not None:  # The parent's silence is its own supervisor's concern.
        end = socket.socket(fileno=arguments.pulse)
        _pulses.append(Pulse({"": end}, lambda *_: None, silent=float("inf")))
    if arguments.bound and sys.platform == "linux":
        # For a child that hangs with the interpreter locked, when the thread below cannot run.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder: Path = arguments.folder
    stacks = (folder / STACKS).open("w")
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True, chain=True)
    THREADS.keep("lifeline", _follow_parent)
    return stacks


def tell_parent(why: str) -> None:
    """Report to the parent why this process cannot go on, from any thread. The computing thread
    notices it much later on busy cores, and the parent need not wait for that."""
    for pulse in _pulses:
        pulse.say(why)


def _follow_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os._exit(ORPHANED)
