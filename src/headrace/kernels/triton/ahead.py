"""Kernels of a start compiled by several threads at once, before any is launched.

A first start compiles some fifty kernels, 0.3 to 3.6 seconds each, as the first steps launch them:
one after the other. Here the same steps run, but a launch only hands its kernel to a pool. The
compiler releases the interpreter lock for its passes, and the assembler is a process of its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

from ..arrays import tensor
from ..cuda_graphs import null_step
from ..operators import StepLimits
from ..program import LOGITS, CallByCall

log = logging.getLogger("headrace.kernels")

WARM_UP = (1, 2, 5, 17, 33, 65, 129, 257, 512, 1024)
"""Steps of these many tokens use every configuration of the table and every specialisation."""
MOST_THREADS = 16
EVERY = 2.0
"""Seconds between two lines of progress."""


class CountedPool(ThreadPoolExecutor):
    """Worker threads that report how many of the given tasks are done."""

    def __init__(self, threads: int, tell: Callable[[int, int], None]) -> None:
        super().__init__(threads, "headrace-compile")
        self._tell = tell
        self.given = self.done = 0

    def submit(self, *given: Any, **named: Any) -> Future[Any]:
        self.given += 1
        future = super().submit(*given, **named)
        future.add_done_callback(self._count)
        return future

    def _count(self, _: Future[Any]) -> None:
        self.done += 1
        self._tell(self.done, self.given)


def warm(plain: CallByCall, limits: StepLimits, draws: Callable[[torch.Tensor], None]) -> None:
    """Launch every kernel that steps without a graph need; `draws`: those from logits to tokens."""
    for tokens in sorted({min(count, limits.tokens) for count in WARM_UP}):
        found = plain.step(null_step(tokens, plain.cache, limits.max_context), LOGITS)
        if tokens == 1:
            draws(tensor(found.logits))


@contextmanager
def compiled_together(threads: int | None = None) -> Iterator[CountedPool]:
    """Inside the block, launches of Triton kernels only compile, in parallel; at its end all are
    compiled. Logs the progress; raises the error of a failed compilation."""
    run, last = JITFunction.run, time.monotonic()

    def tell(done: int, given: int) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            log.info("GPU kernels: %d of %d so far compiled", done, given)

    def compile_only(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *given, grid=grid, warmup=True, **options)

    begin = time.monotonic()
    with CountedPool(threads or min(MOST_THREADS, os.cpu_count() or 1), tell) as pool:
        JITFunction.run = compile_only
        try:
            with AsyncCompileMode(pool):
                yield pool
        finally:
            JITFunction.run = run
    log.info("GPU kernels: %d compiled or found in %.1f s", pool.given, time.monotonic() - begin)
