"""The real worker as slowly as a test wants it."""

from __future__ import annotations

import time
from typing import Any

from engine_fakes import LET_GO, noted

from headrace.base.facts import WorkerFacts
from headrace.base.modelfiles import ModelFiles
from headrace.base.step import StepPlan
from headrace.base.workeroptions import WorkerOptions
from headrace.engine.loop.executor import LoadedWorker
from headrace.engine.loop.real import load_worker

CRAWLING = "crawling_worker:load"


def load(files: ModelFiles, settings: WorkerOptions) -> tuple[LoadedWorker, WorkerFacts]:
    """The real worker, which crawls from its twentieth step on until the test lets go."""
    worker, facts = load_worker(files, settings)
    launch, steps = worker.launch, 0  # type: ignore[attr-defined]

    def crawl(plan: StepPlan) -> Any:
        nonlocal steps
        steps += 1
        if steps > 20 and not noted(LET_GO):
            time.sleep(0.25)
        return launch(plan)

    worker.launch = crawl  # type: ignore[attr-defined]
    worker.execute = lambda plan: crawl(plan)()  # type: ignore[method-assign]
    return worker, facts
