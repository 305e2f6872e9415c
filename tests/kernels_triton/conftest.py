"""Kernels run in Triton's interpreter; the switch must be set before triton is imported.

So these tests belong in a process of their own where a GPU is present: `make gpu-dry` starts one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

os.environ["TRITON_INTERPRET"] = "1"
# The cases of the reference kernels serve here too.
sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))


@pytest.fixture(autouse=True, scope="module")
def numbers_like_a_devices() -> Iterator[None]:
    """A device says nothing of an invalid number; numpy, in which the interpreter computes, warns,
    also of what was read from fresh memory and is not used."""
    with np.errstate(all="ignore"):
        yield
