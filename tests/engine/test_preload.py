"""Work of a start in addition to its imports, each in a process of its own."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest

from headrace.base.config import DEFAULT_MODEL, EngineOptions
from headrace.base.hardware import torch_build
from headrace.engine import preload
from headrace.engine.preload import collector_paused, wants_torch

PRELOAD = """
import sys
from headrace.engine.preload import preload_torch
thread = preload_torch()
assert thread is not None and "torch" not in sys.modules
thread.join()
assert any("libtorch_cpu.so" in line for line in open("/proc/self/maps"))
import torch
x = torch.randn(300, 300)
assert torch.allclose(x @ torch.eye(300), x)
assert preload_torch() is None
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the preload is for Linux")
@pytest.mark.skipif(torch_build()[1] is not None, reason="builds with CUDA are not preloaded")
def test_torch_works_after_its_library_was_loaded_beside() -> None:
    done = subprocess.run([sys.executable, "-c", PRELOAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


GGUF = "model.gguf"


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        (False, {"model": DEFAULT_MODEL}),
        (False, {"model": GGUF}),
        (False, {"model": "some/where-GGUF:q4_k_m", "device": "cpu", "kernels": "cpu"}),
        (False, {"model": "some/folder"}),
        (True, {"model": GGUF, "device": "cuda"}),
        (True, {"model": GGUF, "kernels": "ref"}),
        (True, {"model": GGUF, "max_adapters": 1}),
    ],
)
def test_whether_torch_will_be_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(preload, "gpus", tuple)
    for build in (("2.13.0", None), ("2.13.0", "13.0")):  # Also that for CUDA, without a GPU.
        monkeypatch.setattr(preload, "torch_build", lambda build=build: build)
        assert wants_torch(EngineOptions(**options)) == wanted


def test_a_gpu_wants_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "gpus", lambda: ("a GPU",))
    monkeypatch.setattr(preload, "torch_build", lambda: ("2.13.0", "13.0"))
    assert wants_torch(EngineOptions(model=GGUF))
    assert not wants_torch(EngineOptions(model=GGUF, device="cpu"))


START_THAT_FAILS = """
import gc
from headrace.engine.preload import collector_paused

class Loop:
    alive = 0

    def __init__(self):
        Loop.alive += 1
        self.me = self

    def __del__(self):
        Loop.alive -= 1

assert gc.isenabled()
try:
    with collector_paused():
        assert not gc.isenabled()
        Loop()
        raise ZeroDivisionError
except ZeroDivisionError:
    pass
assert gc.isenabled() and gc.get_freeze_count() == 0
gc.collect()
assert Loop.alive == 0
"""


def test_the_collector_comes_back_and_still_collects() -> None:
    # Not in this process: what an earlier test froze stays frozen.
    done = subprocess.run([sys.executable, "-c", START_THAT_FAILS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
