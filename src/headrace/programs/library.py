"""ONNX Runtime, bounded: an arena per program, threads that sleep between runs, one clock.

The arena bounds what runs allocate; a session has the threads of the engine that owns it, and
they do not spin, so that several programs and the kernels share the cores.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from ..base.extras import needed
from ..obs.threads import THREADS

FOLDED = 64 << 20
"""Largest constant that is computed while a session is made, outside its arena."""
_SILENT = 4
_AS_REQUESTED = 1
_lock = threading.Lock()
_PLACE = re.compile(r"\S*onnxruntime\S*:\d+ (?:[^()]*\([^()]*\)(?: const)? )?")
"""File, line and function of the library's source, in its errors."""


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


def plain(error: BaseException) -> str:
    """Return the library's reason in one line, without its own file names."""
    text = " ".join(str(error).split()).removeprefix("[ONNXRuntimeError] : ")
    kept = text.partition("Status Message: ")[2] or text.partition(" : ")[2] or text
    return _PLACE.sub("", kept.rpartition("Status Message: ")[2])[:300].rstrip(".! ")
