"""ONNX Runtime, bounded: an arena per program, threads that sleep between runs, one clock.

The arena bounds what runs allocate; a session has the threads of the engine that owns it, and
they do not spin, so that several programs and the kernels share the cores.
"""

from __future__ import annotations

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


@cache
def library() -> Any:
    """Import ONNX Runtime. Raises `PackageAbsent`."""
    found = needed("onnxruntime", "programs", "programs")
    found.set_default_logger_severity(_SILENT)
    return found


def session(
    data: bytes, outside: Mapping[str, bytes], *, fixed: bool, threads: int, memory: int
) -> Any:
    """Make a session from bytes that were inspected, with an arena of `memory` bytes; `fixed`: all
    shapes are known. Raises whatever the library raises."""
    runtime = library()
    options = runtime.SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.use_deterministic_compute = True
    options.enable_mem_pattern = fixed  # It keeps a plan for each set of shapes, without a bound.
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


class Clock:
    """The thread that stops runs at their time limit."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[float, Any]] = {}
        self._wake = threading.Condition()
        self._next = 0.0
        self._started = False
        self._stopped: set[int] = set()

    @contextmanager
    def limit(self, options: Any, seconds: float) -> Iterator[None]:
        """Stop the run of `options` after `seconds`; `late` then tells so."""
        key, end = id(options), time.monotonic() + seconds
        with self._wake:
            self._ends[key] = end, options
            if not self._started:
                self._started = True
                THREADS.keep("programs-clock", self._watch)
            if end < self._next:
                self._wake.notify()
        try:
            yield
        finally:
            with self._wake:
                self._ends.pop(key, None)

    def late(self, options: Any) -> bool:
        """Whether the clock stopped this run; asked once, after it."""
        with self._wake:
            found = id(options) in self._stopped
            self._stopped.discard(id(options))
            return found

    def _watch(self) -> None:
        while True:
            with self._wake:
                now = time.monotonic()
                for key, (end, options) in list(self._ends.items()):
                    if end <= now:
                        options.terminate = True
                        self._stopped.add(key)
                        del self._ends[key]
                ends = [end for end, _ in self._ends.values()]
                self._next = min([now + 3600.0, *ends])
                self._wake.wait(self._next - now)


CLOCK = Clock()
