"""Kernels run in Triton's interpreter; the switch must be set before triton is imported.

So these tests belong in a process of their own where a GPU is present: `make gpu-dry` starts one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
# The cases of the reference kernels serve here too.
sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))
