"""Set before any test is imported: every step plan is verified in tests, and the property tests run
the same examples every time."""

from __future__ import annotations

import functools
import gc
import inspect
import mmap
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import httpx._transports.default as transports
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import paths
from headrace.base import textlibrary
from headrace.base.hardware import sum_in_one_order
from headrace.engine.preload import give_back

os.environ.setdefault("HEADRACE_CHECK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Before PyTorch and NumPy are loaded: as many workers as cores, each with a team of OpenMP threads
# that spin until the other's let go of a core, took seven times as long (ADR 0074).
os.environ.setdefault("OMP_NUM_THREADS", "1")

if os.environ.get("TEXT_LIBRARY_UNDER_TEST"):  # test_native_sanitized: one of another build
    textlibrary.FILE = textlibrary.INSTALLED = Path(os.environ["TEXT_LIBRARY_UNDER_TEST"])

# A test's oracle may be the first to multiply in its process.
sum_in_one_order()

# A background job of a shell ignores SIGINT, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ("skips", "tiny.kept")

# The same examples every time, so that what was green stays green; `make explore` looks for new.
# How long an example takes to make says how busy the machine is.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_UNTIMED)
settings.register_profile("explore", derandomize=False, print_blob=True, **_UNTIMED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Begin every test with the same random numbers: what is green here is green elsewhere, in any
    order and on any worker; `make explore` draws new ones."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "explore":
        random.seed(0)
        np.random.seed(0)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(0)


# httpx waits five seconds for each part of an answer where nothing else is said: less than a busy
# machine may stand still. What a test bounds, it bounds itself.
PATIENCE = inspect.signature(httpx.get).parameters["timeout"].default
for part in ("connect", "read", "write", "pool"):
    setattr(PATIENCE, part, 120.0)
# Each client, and so each `httpx.get`, reads the certificates anew: 16 ms, however near the server.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)


LARGE = 1 << 30
"""Bytes of a process that is asked to give memory back."""


@pytest.fixture(scope="module", autouse=True)
def memory_given_back() -> Iterator[None]:
    """Return the memory of a module's tests. The largest by far is the default model in fp32 in
    transformers, the oracle of `models/test_real_models.py`: 5.6 GB. Engines of real models made
    within the process leave up to 0.9 GB each."""
    yield
    statm = Path("/proc/self/statm")
    if statm.exists() and int(statm.read_text().split()[1]) * mmap.PAGESIZE > LARGE:
        gc.collect()
        give_back()


HERE = Path(__file__).parent
WHOLE = (
    "bench/test_gated_load.py",
    "bench/test_harness.py",
    "bench/test_hearing.py",
    "bench/test_lies.py",
    "bench/test_load.py",
    "bench/test_peer_scripts.py",
    "bench/test_questions.py",
    "bench/test_simulated_failures.py",
    "cli",
    "deploy",
    "engine/test_adapters_in_engine.py",
    "engine/test_async_engine.py",
    "engine/test_context_cache.py",
    "engine/test_drafts_of_held_rows.py",
    "engine/test_embeddings.py",
    "engine/test_llm.py",
    "engine/test_ranks.py",
    "engine/test_seeds.py",
    "engine/test_sleep.py",
    "engine/test_soak.py",
    "engine/test_split.py",
    "engine/test_split_faults.py",
    "engine/test_split_hostile.py",
    "engine/test_structured_output.py",
    "engine/test_supervision.py",
    "factory/test_factory_workflow.py",
    "kernels/test_cuda_graphs.py",
    "kernels/test_row_invariance.py",
    "kernels_cpu/test_memory_of_a_start.py",
    "kernels_cpu/test_program.py",
    "kernels_triton",
    "loader/test_download.py",
    "loader/test_kept_panels.py",
    "models",
    "obs/test_spans.py",
    "roofline/test_planner.py",
    "server/batches/test_server_batches.py",
    "server/test_page_browser.py",
    "server/test_server_adapters.py",
    "server/test_server_chat_pictures.py",
    "server/test_server_chat_sounds.py",
    "server/test_server_embeddings.py",
    "server/test_server_hostile.py",
    "server/test_server_loop.py",
    "server/test_server_messages.py",
    "server/test_server_openai.py",
    "server/test_server_process.py",
    "server/test_server_responses.py",
    "server/test_server_structured.py",
    "server/test_server_trust.py",
    "speech/test_decoding.py",
    "text/test_template.py",
    "worker",
)
"""Tests of whole things (processes, browsers, models, Triton's interpreter): slow, each of them."""
WHOLLY_SLOW = re.compile(r"^pytestmark = .*mark\.(slow|model)\b", re.MULTILINE)


LEFT_OUT = pytest.StashKey[int]()
"""Files that were not imported."""

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
if not HAS_GPU:
    # Before any test module imports a Triton kernel: it is interpreted or not from then on.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file unimported of which the set that was asked for runs nothing: to import all of
    them (transformers, clients, Triton) took each worker half a minute."""
    if HERE not in collection_path.parents or collection_path.suffix != ".py":
        return None
    asked = config.getoption("markexpr")
    path = collection_path.relative_to(HERE)
    if not asked.startswith("not slow") or ("path" in asked and path.as_posix() in paths.FILES):
        return None
    whole = any(path.is_relative_to(each) for each in WHOLE)
    if not whole and not WHOLLY_SLOW.search(collection_path.read_text()):
        return None
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + path.name.startswith("test_")
    return True


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say why a set of quick tests is smaller than its folder."""
    if left_out := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{left_out} files of slow tests alone were left out; `-m path` runs what CI runs of "
            "them, no `-m` all"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        absent = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        if absent:
            config.hook.pytest_deselected(items=absent)
    for item in items:
        path = item.path.relative_to(HERE)
        if any(path.is_relative_to(whole) for whole in WHOLE):
            item.add_marker(pytest.mark.slow)
        if paths.is_path(item.nodeid.removeprefix("tests/")):
            item.add_marker(pytest.mark.path)
