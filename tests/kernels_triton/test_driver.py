"""Triton's own launcher on a driver that runs nothing (`benchmarks/gpu_driver.py`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import torch, triton, triton.language as tl
import gpu_driver
from gpu_models import Step
from triton.runtime.driver import driver
from kernels_of_the_test import kernel, large

device = gpu_driver.Driver("sm_90")
driver.set_active(device)
x = torch.empty(8, device="meta")


def drive(run):
    found = gpu_driver.drive(device, "test", Step("", ((0, 1),)), run)
    print(found.launches, *found.grid, *found.faults, sep=" | ")


drive(lambda: kernel[(3, 65_535)](x))
drive(lambda: kernel[(3, 65_536)](x))
drive(lambda: kernel[(2,)](x, launch_pdl=True))
# Triton's launcher says nothing of a grid whose product is negative in 32 bits, and leaves it out.
drive(lambda: kernel[(65_536, 65_535)](x))
drive(lambda: large[(1,)](x, SIZE=64))
"""
KERNELS = """
import triton
import triton.language as tl


@triton.jit
def kernel(x):
    tl.store(x, 1.0)


@triton.jit
def large(x, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(x + place).to(tl.float16)
    tl.store(x + place, tl.dot(values, tl.trans(values)))
"""


def lines_of(tmp_path: Path) -> list[str]:
    (tmp_path / "kernels_of_the_test.py").write_text(KERNELS)
    (tmp_path / "given.py").write_text(CODE)
    code = (
        "import sys, gpu_driver\n"
        f"done = gpu_driver.run_driven([{str(tmp_path / 'given.py')!r}])\n"
        "print(done.stdout, end='')\n"
        "sys.exit(done.stderr[-1500:] if done.returncode else 0)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = f"{ROOT / 'src'}:{ROOT / 'benchmarks'}:{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_a_device_would_refuse_is_refused(tmp_path: Path) -> None:
    found = lines_of(tmp_path)
    assert found[0] == "1 | 3 | 65535 | 1"
    for refused in found[1:3]:
        assert refused.endswith("| kernel: Triton Error [CUDA]: invalid argument")
    assert "launched []" in found[3]
    assert found[4] == "1 | 1 | 1 | 1"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_steps_of_a_model_reach_the_driver() -> None:
    """Dense weights, every step of the dry run and the largest that there may be."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        done = subprocess.run(
            [
                sys.executable,
                str(ROOT / "benchmarks/gpu_driver.py"),
                *("--model", "0", "--json", file.name),
            ],
            capture_output=True,
            text=True,
            check=False,
            env={**environment, "PYTHONPATH": str(ROOT / "src")},
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.rstrip().endswith("no faults")
    assert "| decode 1024 x 16000 |" in done.stdout
