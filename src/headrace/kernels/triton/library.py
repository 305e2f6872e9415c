"""Torch's own products: of 8-bit numbers, except sizes that its library refuses; and of 16-bit
numbers into fp32.

`torch._scaled_mm` with a scale per row goes to cuBLASLt from CUDA 12.9 on. That has no kernel for
some long matrices with few rows (K 9,216 → N 3,072 up to 256 rows on an H100, pytorch/ao issue
4582), and raises an error for them. These sizes depend on the library's version, so each size is
tried once before its first product, with the row counts at which the library may choose another
kernel. This happens in the first step after loading, before anything is captured.
"""

from __future__ import annotations

import logging

import torch
from torch.nn import functional

from ..weights import Fp8Weight

log = logging.getLogger("headrace.kernels")

FEW = 256
"""Most rows for which one answer serves: above, the library chooses among other kernels."""
TRIED = {True: (17, 32, 64, 128, FEW), False: (FEW + 1, 1024)}
"""Row counts that are tried for few rows and for more."""
DIVISOR = 16
"""The library takes matrices whose sizes are multiples of this."""
BLOCK_DIVISOR = 4
"""Blocks of the input come in multiples of this. Their scales then lie alike in every version of
the library, whether it pads each column of blocks or not."""


class ScaledProducts:
    """Products of e4m3 by the library, with a scale per row of both sides. With many rows also with
    a scale per 128 inputs of a row and per 128 x 128 block of the weight, which cuBLASLt has for
    compute capability 9.0."""

    def __init__(self) -> None:
        self._serves: dict[tuple[int, int, bool, bool], bool] = {}

    def serves(self, weight: Fp8Weight, rows: int) -> bool:
        """Return whether the library computes `rows` rows · weightᵀ, weight [out, in]. Tries it
        once."""
        outs, width = weight.shape
        few = rows <= FEW
        if outs % DIVISOR or width % DIVISOR:
            return False
        # With few rows the weight's bytes bind, and our kernel streams them.
        if weight.blocked and (few or weight.scales.shape[1] % BLOCK_DIVISOR):
            return False
        key = outs, width, few, weight.blocked
        if key not in self._serves:
            self._serves[key] = self._try(weight, TRIED[few])
        return self._serves[key]

    def _try(self, weight: Fp8Weight, counts: tuple[int, ...]) -> bool:
        outs, width = weight.shape
        device, groups = weight.data.device, weight.scales.shape[1]
        for rows in counts:
            codes = torch.zeros(rows, width, dtype=weight.data.dtype, device=device)
            ones = torch.ones(rows, groups, device=device)
            try:
                self.product(codes, ones, weight)
            except (RuntimeError, ValueError) as error:
                log.warning(
                    "the library refuses the fp8 product %d → %d of %d rows, so our own kernel "
                    "serves it up to %s rows: %.200s",
                    width,
                    outs,
                    rows,
                    FEW if rows <= FEW else "any number of",
                    error,
                )
                return False
        return True

    def product(
        self, codes: torch.Tensor, x_scales: torch.Tensor, weight: Fp8Weight
    ) -> torch.Tensor:
        """Multiply codes [N, in], x_scales [N, 1] or [N, in / 128], weight [out, in] → bf16 [N,
        out]."""
        scales = weight.scales.t()
        if weight.blocked:
            # The library wants a column for each 128 inputs: a few bytes compared with the codes.
            x_scales = x_scales.t().contiguous().t()
        return torch._scaled_mm(
            codes,
            weight.data.t(),
            scale_a=x_scales,
            scale_b=scales,
            out_dtype=torch.bfloat16,
            # Sums of blocks are fp32 already.
            use_fast_accum=not weight.blocked,
        )


class WideProducts:
    """Dense products by the library. Its sums of bf16 or fp16 are kept in fp32 for logits. These
    would else be rounded, read, widened and written again, three times their bytes."""

    def __init__(self) -> None:
        self._serves = True

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        home: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute x [N, in] · weight [out, in] transposed + bias → [N, out] of `dtype`; in `home`,
        if it is given and the library writes fp32."""
        if x.device.type != "cpu" and bias is None and dtype == torch.float32 != x.dtype:
            wide = self._wide(x, weight, home)
            if wide is not None:
                return wide
        return functional.linear(x, weight, bias).to(dtype)

    def _wide(
        self, x: torch.Tensor, weight: torch.Tensor, home: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the product in fp32; None: the library has no such product. It is tried once, in a
        model's first step, which runs before anything is captured."""
        if not self._serves:
            return None
        try:
            if home is None:
                return torch.mm(x, weight.t(), out_dtype=torch.float32)
            return torch.mm(x, weight.t(), out_dtype=torch.float32, out=home)
        except (RuntimeError, TypeError) as error:
            log.warning("the library has no product of %s into fp32: %.200s", x.dtype, error)
            self._serves = False
            return None
