"""The sources of workers: named functions, so that another process can find the same one.

A loader takes the files and the settings (`WorkerOptions`) and
returns a loaded worker with its facts. A loader of further models of a server also takes `beside`,
the worker of another. Tests and the simulator name their own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ...base.config import CPU_KERNELS, Decision
from ...base.extras import needing_torch
from ...base.facts import WorkerFacts
from ...base.modelfiles import ModelFiles
from ...base.workeroptions import WorkerOptions
from ...loader.panels import PanelShelf
from ...loader.progress import ProgressLine
from .executor import LoadedWorker
from .grammar import tokenizer_for_grammars

REAL_WORKER = "headrace.engine.loop.real:load_worker"


WorkerLoader = Callable[..., tuple[LoadedWorker, WorkerFacts]]


def worker_loader(name: str) -> WorkerLoader:
    """Return the function that `module:function` names."""
    module, _, function = name.partition(":")
    loader: WorkerLoader = getattr(import_module(module), function)
    return loader


def load_worker(
    files: ModelFiles, settings: WorkerOptions, beside: Any = None
) -> tuple[LoadedWorker, WorkerFacts]:
    """Load the real worker on the device that the settings name. `beside`: the `Worker` of another
    model, which computes at other times."""
    begin = time.monotonic()
    with (
        needing_torch(lambda: _who_needs_torch(files, settings)),
        ThreadPoolExecutor(1, "headrace-panels") as thread,
    ):
        # Kept weights are read and checked by another core while this one imports the worker.
        shelf = thread.submit(_shelf, files, settings)
        # Local: only a process with a worker pays for these imports.
        from ...worker import Worker

        imported = time.monotonic() - begin
        worker = Worker(
            files,
            settings,
            grammar_tokenizer=tokenizer_for_grammars(files),
            shelf=shelf.result(),
            beside=beside,
        )
    facts = worker.facts
    return worker, replace(facts, phases={"import_worker": imported, **facts.phases})


def _shelf(files: ModelFiles, settings: WorkerOptions) -> PanelShelf | None:
    """Return a model's packed-weight cache, if the CPU kernels may serve it and keeping is
    wanted."""
    if settings.panels is None or settings.device != "cpu":
        return None
    if settings.kernels not in ("auto", "cpu"):
        return None
    # Local: imports numpy, 60 ms of the process that only serves HTTP.
    from ...kernels.cpu.library import LAYOUT

    return PanelShelf(
        files, Path(settings.panels), LAYOUT, progress=ProgressLine(enabled=sys.stderr.isatty())
    )


def kernel_decisions(files: ModelFiles, settings: WorkerOptions) -> list[Decision]:
    """Return the kernels that would serve, operator by operator; loads no weight."""
    with needing_torch(lambda: _who_needs_torch(files, settings)):
        from ...worker import loading  # Local, as above.

        return loading.kernel_decisions(files, settings)


def _who_needs_torch(files: ModelFiles, settings: WorkerOptions) -> str:
    """Return the first of the reasons why a worker computes on tensors."""
    # Local, as above.
    from ...kernels.cpu.library import LibraryAbsent, load

    device, kernels = settings.device, settings.kernels
    if device != "cpu":
        return f"device {device}"
    if kernels not in CPU_KERNELS:
        return f"--kernels {kernels}"
    if settings.adapters:
        return "serving adapters"
    try:
        load()
    except LibraryAbsent as absent:
        return f"serving without the CPU kernels ({absent})"
    return f"a type of the tensors in {files.name}"
