"""Embedded GPUs: the row of the table that serves each, and that its toolchain takes the kernels of
a small model, in the shared memory that a block has there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from headrace.kernels.triton import table  # noqa: E402

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EMBEDDED = {
    "sm_87": ("Jetson Orin, DRIVE Orin", "sm_86", 163),
    "sm_110": ("Jetson Thor, DRIVE Thor", "sm_100", 227),
    "sm_121": ("DGX Spark", "sm_120", 99),
}
"""Architecture → devices, their row of the table, KiB of shared memory of a block."""
COMPILE = """
import sys
import torch
from torch.fx.experimental import _config
from unittest.mock import patch
from gpu_aot import compiling
from gpu_absent import Unknown, forward

target, row, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]) << 10
known = {}
with torch.inference_mode(), Unknown(), compiling(target, known) as found:
    forward(row)
names = {one.kernel for one in found}
assert len(names) > 8 and all(one.machine for one in found), names
over = {one.kernel: one.shared for one in found if one.shared > limit}
assert not over, over
print(len(found))
"""


@pytest.mark.parametrize("target", EMBEDDED)
def test_each_device_has_the_row_of_its_kind(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = int(target.removeprefix("sm_"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(number, 10))
    device = torch.device("cuda")
    assert table.architecture(device) == EMBEDDED[target][1]
    assert table.multiplies_fp8(device) == (number >= 89)


@pytest.mark.slow
@pytest.mark.parametrize("target", EMBEDDED)
def test_the_toolchain_takes_the_kernels(target: str) -> None:
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = f"{BENCHMARKS.parent / 'src'}:{BENCHMARKS}"
    _, row, limit = EMBEDDED[target]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, target, row, str(limit)],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 20
