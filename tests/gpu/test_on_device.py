"""Every kernel and path on a real device: the checks of `make gpu-bench`, one a test.

Deselected where there is no NVIDIA GPU (`tests/conftest.py`); `make gpu-bench` runs the same
without pytest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
if torch.cuda.is_available():
    import gpu_checks

    NAMES = list(gpu_checks.all_checks())
else:
    NAMES = ["everything"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_right_on_the_device(name: str) -> None:
    row = gpu_checks.run_check(name, "cuda", torch.bfloat16)
    assert row["right"], row
