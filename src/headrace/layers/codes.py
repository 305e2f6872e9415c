"""Activations on their way to a product: as values, as the codes that an 8-bit product wants, or
before the norm that the product takes itself; and on their way from it to the residual."""

from __future__ import annotations

from typing import cast

from ..kernels.arrays import Array
from ..kernels.operators import Coded, CodedOperators, FusedOperators, Operators, Unnormed
from ..kernels.weights import Weight

Activations = Array | Coded | Unnormed
Stream = tuple[Array, Array | None]
"""(what a block gave, the residual it is still to be added to)."""


def coded(ops: Operators, consumer: Weight) -> CodedOperators | None:
    """`ops`, where it can write the input of a product with `consumer` as codes."""
    takes = getattr(ops, "takes_codes", None)
    return cast(CodedOperators, ops) if takes is not None and takes(consumer) else None


def fused(ops: Operators, weight: Weight, x: Activations) -> FusedOperators | None:
    """`ops`, where its product of x with `weight` also does what lies around it."""
    fuses = getattr(ops, "fuses", None)
    if fuses is None or isinstance(x, Coded):
        return None
    rows = len(x.x if isinstance(x, Unnormed) else x)
    return cast(FusedOperators, ops) if fuses(weight, rows) else None


def product(ops: Operators, x: Activations, weight: Weight, bias: Array | None) -> Array:
    """x [N, in] → x · weightᵀ + bias [N, out]."""
    if isinstance(x, Coded):
        return cast(CodedOperators, ops).linear_codes(x, weight, bias)
    if isinstance(x, Unnormed):
        return cast(FusedOperators, ops).linear_fused(x, weight, bias, None)
    return ops.linear(x, weight, bias)


def product_onto(
    ops: Operators,
    x: Array,
    weight: Weight,
    bias: Array | None,
    residual: Array | None,
) -> Stream:
    """x [N, in] → x · weightᵀ + bias [N, out], added to the residual where the product does so."""
    joined = None if residual is None else fused(ops, weight, x)
    if joined is None:
        return ops.linear(x, weight, bias), residual
    return joined.linear_fused(x, weight, bias, residual), None
