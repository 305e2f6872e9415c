"""What a machine may lack before a first launch; kernels compiled by several threads at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base import environment
from headrace.kernels.triton import toolchain

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
TOGETHER = """
import logging, sys, time
import torch, triton, triton.language as tl
from triton.runtime.driver import driver
from gpu_aot import _AbsentDevice
from headrace.kernels.triton import ahead

logging.basicConfig(level="INFO", format="%(message)s")
ahead.EVERY = 0.0
driver.set_active(_AbsentDevice("sm_90"))

@triton.jit
def kernel(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) * SIZE)

x = torch.empty(64, device="meta")
run = triton.runtime.jit.JITFunction.run
with ahead.compiled_together(2) as pool:
    for size in (16, 32, 64, 16):
        kernel[(1,)](x, SIZE=size)
assert (pool.given, pool.done) == (3, 3), (pool.given, pool.done)
assert triton.runtime.jit.JITFunction.run is run
begin = time.monotonic()
with ahead.compiled_together(2) as pool:
    kernel[(1,)](x, SIZE=32)
assert pool.given == 0, "a kernel that is there is not compiled again"

@triton.jit
def broken(x):
    tl.store(x, no_such_name)

try:
    with ahead.compiled_together(2):
        broken[(1,)](x)
except Exception as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError("an error of the compiler is lost")
assert triton.runtime.jit.JITFunction.run is run
"""


@pytest.mark.slow
def test_kernels_compile_together_and_say_how_far_they_are(tmp_path: Path) -> None:
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    given = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    given |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": BENCHMARKS}
    done = subprocess.run([sys.executable, script], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "GPU kernels: 3 of 3 so far compiled" in done.stderr
    assert "GPU kernels: 3 compiled or found in" in done.stderr


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a compiler, whose home is elsewhere."""
    for name in ("CC", "TRITON_CACHE_DIR", "TRITON_LIBCUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    # What the code under test sets is gone after the test.
    monkeypatch.setattr(environment.os, "environ", dict(os.environ))
    toolchain.toolchain_obstacle.cache_clear()
    return tmp_path / ".triton" / "cache"


def test_without_a_compiler_the_reason_says_what_helps(bare: Path) -> None:
    assert "gcc or clang" in (toolchain.toolchain_obstacle() or "")


def test_launchers_in_the_cache_need_no_compiler(bare: Path) -> None:
    launcher = bare / "ABC" / "cuda_utils.cpython-311-x86_64-linux-gnu.so"
    launcher.parent.mkdir(parents=True)
    launcher.touch()
    assert toolchain.toolchain_obstacle() is None
    assert environment.triton_cache() == bare


def test_a_cache_that_cannot_be_written_is_continued_elsewhere(
    bare: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = bare / "ABC" / "cuda_utils.cpython-311-x86_64-linux-gnu.so"
    launcher.parent.mkdir(parents=True)
    launcher.write_text("one")
    monkeypatch.setattr(toolchain, "_writable", lambda folder: folder != bare)
    assert toolchain.toolchain_obstacle() is None
    made = environment.triton_cache()
    assert made != bare
    assert (made / "ABC" / launcher.name).read_text() == "one"
    assert str(bare) in caplog.text


def test_a_folder_that_may_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not toolchain._writable(tmp_path / "file" / "cache")
    assert toolchain._writable(tmp_path / "new" / "cache")
