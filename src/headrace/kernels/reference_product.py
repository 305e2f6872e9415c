"""Product of the reference, padded to row counts with one order of summation."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..base.hardware import sum_in_one_order

ROWS = 4
"""Below `FREE_ROWS` rows, a product is padded to a multiple of this."""
FREE_ROWS = 16

sum_in_one_order()


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Compute x [N, K] · matrixᵀ, matrix [M, K] → [N, M]; a row's result does not depend on N."""
    if len(matrix) == 1:
        # With one output torch uses its vector product, whose sums depend on N.
        return product(x, matrix.expand(2, -1))[:, :1]
    rows = len(x)
    if rows >= FREE_ROWS or rows % ROWS == 0:
        return functional.linear(x.contiguous(), matrix)
    return functional.linear(functional.pad(x, (0, 0, 0, -rows % ROWS)), matrix)[:rows]
