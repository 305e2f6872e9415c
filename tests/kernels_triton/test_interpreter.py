"""Environment of this folder's tests: Triton's interpreter with a device's rounding, and memory
that spoils reads before a write."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _round_kernel(x, y, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y + place, tl.load(x + place).to(tl.bfloat16))


@triton.jit
def _widen_kernel(x, y, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y + place, tl.load(x + place).to(tl.float32))


def test_bf16_is_rounded_as_torch_rounds() -> None:
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40, 1.00390625, 1.01171875]
    x = torch.cat([torch.tensor(special), torch.randn(1024 - len(special)) * 100])
    y = torch.zeros(1024, dtype=torch.bfloat16)
    _round_kernel[(1,)](x, y, SIZE=1024)
    torch.testing.assert_close(y, x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    wide = torch.zeros(1024)
    _widen_kernel[(1,)](y, wide, SIZE=1024)
    torch.testing.assert_close(wide, y.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_fresh_memory_is_no_number(dtype: torch.dtype) -> None:
    x = torch.zeros(3, dtype=dtype)
    for made in (torch.empty(5, dtype=dtype), torch.empty_like(x), x.new_empty((2, 2))):
        assert made.float().isnan().all()


def test_fresh_integers_are_far_from_any_place() -> None:
    for dtype in (torch.int32, torch.int64):
        assert (torch.empty(4, dtype=dtype) == 2**31 - 1).all()
    assert (torch.empty(4, dtype=torch.uint8) == 255).all()


def test_what_reads_before_it_is_written_shows() -> None:
    out = torch.zeros(16)
    _widen_kernel[(1,)](torch.empty(16, dtype=torch.bfloat16), out, SIZE=16)
    assert np.isnan(out.numpy()).all()
