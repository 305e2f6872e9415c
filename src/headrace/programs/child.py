"""The confined child: it loads one program, runs it once, and then serves runs.

`python -m headrace.programs.child` is started by `confined`. Before it sees a byte of the file it
has given up opening files, sockets, processes and threads. Each lane is a thread that waits for the
number of its next run on a pipe, finds the inputs in a region of shared memory, and leaves the
outputs there. Standard input then carries numbers of runs to stop; its end is the end.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from ..base.errors import HeadraceError
from ..base.foreign import json_reader
from ..media.seccomp import confine, leave_networks
from ..obs.threads import THREADS
from .confined import MESSAGE, ChildOrder, ChildSaid, LaneFiles, receive
from .inspection import Inspection, ProgramLimits
from .library import CLOCK, library, plain, run_options
from .onnx import description
from .region import HEAD, Region, RunHead
from .runner import ForeignProgram


class ChildLane:
    """One run at a time, in a thread of its own."""

    def __init__(self, files: LaneFiles, size: int) -> None:
        self._files = files
        self._region = Region(files.region, size)
        self._options: Any = None
        self._stopped = 0
        self._program: ForeignProgram | None = None
        self._open = threading.Event()

    def open(self, program: ForeignProgram) -> None:
        """Serve from now on."""
        self._program = program
        self._open.set()

    def stop(self, number: int) -> None:
        """Stop the run of this number before its next node."""
        self._stopped = number
        options = self._options
        if options is not None and options[0] == number:
            options[1].terminate = True

    def serve(self) -> None:
        self._open.wait()
        while (message := receive(self._files.orders)) is not None:
            length, number = message
            length = self._run(length, number)
            os.write(self._files.answers, MESSAGE.pack(length, number))

    def _run(self, length: int, number: int) -> int:
        assert self._program is not None
        end = HEAD
        try:
            head, feed = self._region.get(length)
            end = head.end
            options = run_options()
            self._options = number, options
            if self._stopped == number:  # `stop` may come before, after or between.
                options.terminate = True
            begun = time.thread_time_ns()
            found = self._program.run(feed, seed=head.seed, seconds=head.seconds, options=options)
            took = time.thread_time_ns() - begun
            return self._region.put(found, RunHead([], processor_ns=took), end)
        except HeadraceError as error:
            told = [type(error).__name__, error.message, error.param or "", error.code or ""]
        except Exception as error:  # noqa: BLE001 - the parent says that the run failed
            told = ["EngineFault", f"a run failed: {type(error).__name__}", "", ""]
        finally:
            self._options = None
        return self._region.put({}, RunHead([], error=told), end)


def main() -> None:
    """Load the program in the file of this number, behind a line of JSON that orders it."""
    library()
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        order = json_reader(ChildOrder)(file.readline())
        parts = {name: file.read(size) for name, size in order.parts.items()}
    leave_networks()
    lanes = [ChildLane(one, order.region) for one in order.lanes]
    with CLOCK.limit(run_options(), time.monotonic() + 3600.0):  # Its thread begins here.
        for lane in lanes:
            THREADS.keep("program-lane", lane.serve)
    status = os.open("/proc/self/status", os.O_RDONLY) if os.path.isdir("/proc/self") else None
    begun, space = _kilobytes(status, "VmRSS"), _kilobytes(status, "VmSize")
    confine((space << 10) + order.memory if space else -1, -1, 0)
    start = time.monotonic()
    try:
        data = parts.pop("")
        limits = ProgramLimits(order.limit, seconds=order.seconds)
        program = ForeignProgram(
            Inspection(order.name, data, description(data), parts), limits, trial=False
        )
        seconds = time.monotonic() - start
        if order.run:
            _tried(program)
    except (MemoryError, HeadraceError, ValueError) as error:
        return _say(_refused(error))
    memory = max(0, _kilobytes(status, "VmHWM") - begun) << 10
    gc.collect()
    gc.freeze()  # Between two frames there is little to look through.
    for lane in lanes:
        lane.open(program)
    _say(ChildSaid(memory=memory, seconds=seconds))
    while (message := receive(0)) is not None:
        lanes[message[0]].stop(message[1])
    os._exit(0)


def _refused(error: BaseException) -> ChildSaid:
    cause = error.__context__ or error  # The library's own.
    memory = isinstance(cause, MemoryError) or "bad_alloc" in str(cause)
    memory = memory or "allocate" in str(cause).lower()
    return ChildSaid(refused="memory" if memory else plain(cause))


def _tried(program: ForeignProgram) -> None:
    """Run once with zeros; a refusal of them is no fault."""
    feed = {
        name: np.zeros([dim if isinstance(dim, int) else 1 for dim in port.dims or ()], port.type)
        for name, port in program.inputs.items()
    }
    with suppress(HeadraceError, MemoryError):
        program.run(feed)


def _kilobytes(status: int | None, key: str) -> int:
    """Return a size of this process; 0 where the system does not tell."""
    text = "" if status is None else os.pread(status, 8192, 0).decode()
    return next((int(row.split()[1]) for row in text.splitlines() if row.startswith(f"{key}:")), 0)


def _say(said: ChildSaid) -> None:
    os.write(1, msgspec.json.encode(said) + b"\n")


if __name__ == "__main__":
    main()
