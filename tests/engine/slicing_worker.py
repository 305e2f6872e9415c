"""The real worker, which dies, hangs or fails in a slice of an encoding, once, when told to."""

from __future__ import annotations

import os
import signal
import time

from engine_fakes import HUNG, note, noted, tell

from headrace.base.facts import WorkerFacts
from headrace.base.modelfiles import ModelFiles
from headrace.base.workeroptions import WorkerOptions
from headrace.engine.loop.executor import LoadedWorker
from headrace.engine.loop.real import load_worker
from headrace.sched import price

SLICING = "slicing_worker:load"
DIES, HANGS, FAILS = "slice-dies", "slice-hangs", "slice-fails"
"""Files of the notes: the next second slice does so."""


def load(files: ModelFiles, settings: WorkerOptions) -> tuple[LoadedWorker, WorkerFacts]:
    # A step has one slice, so that there is something between two of them.
    price.STEP_SECONDS = price.ALONE_SECONDS = 0.0
    worker, facts = load_worker(files, settings)
    encoder = worker.encoder  # type: ignore[attr-defined]
    run = encoder.run

    def told(what: str) -> bool:
        path = note(what)
        if path is None or not noted(what):
            return False
        path.unlink()
        return True

    def slice_(slot: int, first: int, count: int) -> None:
        tell(f"encoded-{os.getpid()}-{encoder._items[slot].name.digest.hex()[:8]}-{first}")
        if first and told(DIES):
            os.kill(os.getpid(), signal.SIGKILL)
        if first and told(HANGS):
            tell(f"{HUNG}{os.getpid()}")
            time.sleep(1e6)
        if first and told(FAILS):
            raise RuntimeError("the item fails")
        run(slot, first, count)

    encoder.run = slice_
    return worker, facts
