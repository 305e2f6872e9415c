"""One tiny model for all tests of the worker."""

from __future__ import annotations

import pytest

from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions
from tiny import families
from tiny.kept import Kept


@pytest.fixture(scope="session")
def worker_files(kept: Kept):
    return open_model(str(kept(families.make, "qwen2")))


@pytest.fixture(scope="session")
def make_worker(worker_files):
    def make(**options) -> Worker:
        defaults = {"kernels": "ref", "threads": 1, "rows": 40, "step_tokens": 512}
        return Worker(worker_files, WorkerOptions(**{**defaults, "max_context": 2048, **options}))

    return make


@pytest.fixture(scope="session")
def worker(make_worker) -> Worker:
    """Shared: `allocate` frees all rows."""
    return make_worker()
