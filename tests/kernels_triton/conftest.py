"""Kernels run in Triton's interpreter; the switch must be set before triton is imported.

So these tests belong in a process of their own where a GPU is present: `make gpu-dry` starts one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

# The cases of the reference kernels serve here too.
sys.path.insert(0, str(Path(__file__).parent.parent / "kernels"))


POISON = 0x7FFF_FFFF
"""Content of fresh memory: a NaN in two, four and eight bytes, and an out-of-range integer."""
empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty


def poisoned(made: torch.Tensor) -> torch.Tensor:
    if made.device.type != "cpu" or not made.numel():
        return made
    if made.is_floating_point():
        if made.element_size() == 1:
            made.view(torch.uint8).fill_(0x7F)
            return made
        return made.fill_(torch.nan)
    return made.fill_(
        True if made.dtype == torch.bool else min(torch.iinfo(made.dtype).max, POISON)
    )


def rounded(
    values: np.ndarray[Any, Any], source: tl.dtype, target: tl.dtype, mode: object
) -> np.ndarray[Any, Any]:
    """Triton's `_convert_float`, but for fp32 and bf16 as a device has it: to the nearest, of two
    as near to the even. Triton's cuts bits off."""
    if (source, target) == (tl.bfloat16, tl.float32):
        return values.view(np.uint16).astype(np.uint32) << np.uint32(16)
    if (source, target) != (tl.float32, tl.bfloat16):
        return convert(values, source, target, mode)
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(
        16
    )
    return np.where(np.isnan(values), np.uint32(0x7FC0), nearest).astype(np.uint16)


convert = interpreter._convert_float
dot = interpreter.InterpreterBuilder.create_dot


def dotted(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
    """Triton's `create_dot`, but for sums of fp32, which are taken in 64 bits and rounded once: on
    some processors (Zen 5) numpy's library sums rows of one tile in different orders, a device
    does not."""
    if d.data.dtype != np.float32 or a.data.dtype.kind != "f" or b.data.dtype.kind != "f":
        return dot(self, a, b, d, *how)
    sums = np.matmul(a.data, b.data, dtype=np.float64) + d.data
    return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)


@pytest.fixture(autouse=True, scope="module")
def numbers_like_a_devices() -> Iterator[None]:
    """bf16 is rounded as a device rounds it, weights of attention and results alike, and memory
    that nobody has written holds what spoils every sum it gets into; sums of products depend on no
    row beside. A device says nothing of an
    invalid number; numpy, in which the interpreter computes, warns."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(interpreter, "_convert_float", rounded)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dotted)
        patch.setattr(torch, "empty", lambda *size, **given: poisoned(empty(*size, **given)))
        patch.setattr(torch, "empty_like", lambda x, **given: poisoned(empty_like(x, **given)))
        patch.setattr(
            torch.Tensor,
            "new_empty",
            lambda x, *size, **given: poisoned(new_empty(x, *size, **given)),
        )
        yield
