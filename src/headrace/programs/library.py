"""ONNX Runtime, bounded: an arena per program, threads that sleep between runs, one clock.

The arena bounds what runs allocate; a session has the threads of the engine that owns it, and
they do not spin, so that several programs and the kernels share the cores. A first load happens in
a confined child process: a file may make the library allocate or compute without end while a
session is made, or crash it. `python -m headrace.programs.library` is the child.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..base.errors import DoesNotFit, ModelFileError, UnsupportedModel
from ..base.extras import needed
from ..media.seccomp import confine
from ..obs.threads import THREADS
from .inspection import Inspection, ProgramLimits

FOLDED = 64 << 20
"""Largest constant that is computed while a session is made, outside its arena."""
_SILENT = 4
_AS_REQUESTED = 1
_lock = threading.Lock()


@cache
def library() -> Any:
    """Import ONNX Runtime. Raises `PackageAbsent`."""
    found = needed("onnxruntime", "programs", "programs")
    found.set_default_logger_severity(_SILENT)
    return found


def session(
    data: bytes, outside: Mapping[str, bytes], *, patterns: bool, threads: int, memory: int
) -> Any:
    """Make a session from bytes that were inspected, with an arena of `memory` bytes; `patterns`:
    it keeps a plan of memory for each set of shapes. Raises whatever the library raises."""
    runtime = library()
    options = runtime.SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.use_deterministic_compute = True
    options.enable_mem_pattern = patterns
    for key, value in (
        ("session.use_env_allocators", "1"),
        ("session.intra_op.allow_spinning", "0"),
        ("session.inter_op.allow_spinning", "0"),
        ("optimization.constant_folding_max_output_size_in_bytes", str(FOLDED)),
    ):
        options.add_session_config_entry(key, value)
    if outside:  # They must live until the session is made.
        options.add_external_initializers_from_files_in_memory(
            [*outside], [*outside.values()], [len(one) for one in outside.values()]
        )
    place = runtime.OrtMemoryInfo(
        "Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT
    )
    bounds = runtime.OrtArenaCfg({"max_mem": memory, "arena_extend_strategy": _AS_REQUESTED})
    with _lock:  # A session takes the arena that was registered last.
        runtime.create_and_register_allocator(place, bounds)
        return runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run_options() -> Any:
    """Make the options of one run; `terminate` in them stops it before its next node."""
    options = library().RunOptions()
    options.log_severity_level = _SILENT
    return options


class RunClock:
    """The thread that stops runs at their time limit."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[float, Any]] = {}
        self._wake = threading.Condition()
        self._next = 0.0
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, options: Any, end: float) -> Iterator[None]:
        """Stop the run of `options` when `time.monotonic()` is `end`."""
        with self._wake:
            self._ends[id(options)] = end, options
            if self._thread is None or not self._thread.is_alive():
                self._thread = THREADS.keep("programs-clock", self._watch)
            if end < self._next:
                self._wake.notify()
        try:
            yield
        finally:
            with self._wake:
                del self._ends[id(options)]

    def _watch(self) -> None:
        with self._wake:
            while True:
                now = time.monotonic()
                ends = [*self._ends.values()]
                for end, options in ends:
                    if end <= now:
                        options.terminate = True
                self._next = min((end for end, _ in ends if end > now), default=now + 3600.0)
                self._wake.wait(self._next - now)


CLOCK = RunClock()

_SPARE = 256 << 20
_MOST_ANSWER = 4096


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a first load."""

    memory: int
    """Bytes by which the process grew, at most."""
    seconds: float


def tried(inspection: Inspection, data: bytes, limits: ProgramLimits) -> Trial:
    """Load a program in a child, and run it once with zeros if every size is known or may be 1.

    Raises `DoesNotFit`, `ModelFileError` with the library's reason, `UnsupportedModel` if it
    crashes or takes too long.
    """
    library()  # Its absence is this process's error.
    parts = {"": data, **inspection.outside}
    order = {
        "parts": {name: len(one) for name, one in parts.items()},
        "memory": limits.memory + 2 * sum(map(len, parts.values())) + _SPARE,
        "seconds": max(1, round(limits.load_seconds)),
        "run": not inspection.loops,
    }
    name = inspection.name
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "headrace.programs.library"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": os.defpath},
    ) as child:
        try:
            told = json.dumps(order).encode() + b"\n"
            said, _ = child.communicate(
                b"".join([told, *parts.values()]), timeout=2 * limits.load_seconds
            )
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            child.kill()
    answer: Any = None
    with suppress(ValueError, IndexError):
        answer = json.loads(said[:_MOST_ANSWER].splitlines()[-1])
    answer = answer if isinstance(answer, dict) else {}
    reason, memory, seconds = (answer.get(key) for key in ("refused", "memory", "seconds"))
    if reason == "memory":
        raise DoesNotFit(f"{name} needs more than {limits.memory:,} bytes to load")
    if isinstance(reason, str):
        raise ModelFileError(f"{name} does not load: {reason:.400}")
    if child.returncode or not isinstance(memory, int) or not isinstance(seconds, float):
        raise UnsupportedModel(
            f"{name} ends the process that loads it, or did not load within "
            f"{2 * limits.load_seconds:.0f} s (status {child.returncode})"
        )
    return Trial(memory, seconds)


def main() -> None:
    """Load the program on standard input, behind a line of JSON that orders it."""
    order = json.loads(sys.stdin.buffer.readline())
    library()
    outside = {name: sys.stdin.buffer.read(size) for name, size in order["parts"].items()}
    data = outside.pop("")
    status = os.open("/proc/self/status", os.O_RDONLY) if os.path.isdir("/proc/self") else None
    begun, space = _kilobytes(status, "VmRSS"), _kilobytes(status, "VmSize")
    confine((space << 10) + order["memory"] if space else -1, order["seconds"], 0)
    start = time.monotonic()
    try:
        made = session(data, outside, patterns=False, threads=1, memory=order["memory"])
        seconds = time.monotonic() - start
        if order["run"]:
            _run(made)
    except MemoryError:
        return _say({"refused": "memory"})
    except Exception as error:  # noqa: BLE001 - whatever the library raises is the file's fault
        memory = "bad_alloc" in str(error) or "allocate" in str(error).lower()
        return _say({"refused": "memory" if memory else plain(error)})
    return _say({"memory": max(0, _kilobytes(status, "VmHWM") - begun) << 10, "seconds": seconds})


def _run(made: Any) -> None:
    """Run once with zeros; a refusal of them is no fault."""
    types = {"float": "float32", "double": "float64"}
    given = {}
    for one in made.get_inputs():
        name = one.type.removeprefix("tensor(").removesuffix(")")
        shape = [dim if isinstance(dim, int) else 1 for dim in one.shape]
        given[one.name] = np.zeros(shape, types.get(name, name))
    with suppress(Exception):
        made.run(None, given)


def plain(error: BaseException) -> str:
    """Return the library's reason in one line, without its own file names."""
    text = " ".join(str(error).split()).removeprefix("[ONNXRuntimeError] : ")
    kept = text.partition("Status Message: ")[2] or text.partition(" : ")[2] or text
    return kept.rpartition("Status Message: ")[2][:300].rstrip(".! ")


def _kilobytes(status: int | None, key: str) -> int:
    """Return a size of this process; 0 where the system does not tell."""
    text = "" if status is None else os.pread(status, 8192, 0).decode()
    return next((int(row.split()[1]) for row in text.splitlines() if row.startswith(f"{key}:")), 0)


def _say(answer: dict[str, Any]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
