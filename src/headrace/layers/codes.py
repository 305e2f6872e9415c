"""Activations on their way to a product: as values, or as the codes that an 8-bit product wants."""

from __future__ import annotations

from typing import cast

import torch

from ..kernels.operators import Coded, CodedOperators, Operators
from ..kernels.weights import Weight

Activations = torch.Tensor | Coded


def coded(ops: Operators, consumer: Weight) -> CodedOperators | None:
    """`ops`, where it can write the input of a product with `consumer` as codes."""
    takes = getattr(ops, "takes_codes", None)
    return cast(CodedOperators, ops) if takes is not None and takes(consumer) else None


def product(
    ops: Operators, x: Activations, weight: Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [N, in] → x · weightᵀ + bias [N, out]."""
    if isinstance(x, Coded):
        return cast(CodedOperators, ops).linear_codes(x, weight, bias)
    return ops.linear(x, weight, bias)
