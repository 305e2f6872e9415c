"""Helpers of every kernel file: the interpreter's limits and small device functions."""

from __future__ import annotations

import triton
import triton.language as tl

from ...base.environment import triton_interpreted

INTERPRETED: bool = triton_interpreted()
"""Triton's own switch, read once as Triton reads it: kernels run in Python, on CPU tensors."""
INTERPRET = tl.constexpr(INTERPRETED)
"""`INTERPRETED` inside kernels."""

LOG2E: float = 1.4426950408889634
"""Softmax is taken to base two: exp2 is one instruction."""


@triton.jit
def matrix_product(a, b, accumulator):
    """Compute a [M, K] · b [K, N] + accumulator, in fp32.

    The interpreter's bf16 product returns garbage, so its operands are widened there. fp32 stays
    fp32: the tensor cores' own form of it keeps ten bits.
    """
    if INTERPRET or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator)


@triton.jit
def few_product(a, b, accumulator):
    """Compute `matrix_product` of few rows of `a`. Rows fewer than the 16 of the instruction's
    first side become its second, which has 8 (ADR 0031)."""
    if a.shape[0] < 16:
        turned = matrix_product(tl.trans(b), tl.trans(a), tl.trans(accumulator))
        found = tl.trans(turned)
    else:
        found = matrix_product(a, b, accumulator)
    return found


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """Return the first place that a query sees: in a window of WINDOW places, itself included; or
    in its chunk of -WINDOW, if WINDOW is below zero. A window may begin below zero."""
    return position // -WINDOW * -WINDOW if WINDOW < 0 else position - WINDOW + 1


@triton.jit
def sink_mass(sinks, heads, best):
    """Return the mass that the sinks of `heads` add to sums of weights, where `best` is the largest
    score, to base two."""
    return tl.exp2(tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634 - best)


@triton.jit
def soft_cap(scores, cap: tl.constexpr):
    """Compute cap · tanh(scores / cap), with tanh from one exponential (exact limits at both
    ends)."""
    doubled = tl.exp2(tl.abs(scores) * (-2.0 / cap * 1.4426950408889634))
    magnitude = (1.0 - doubled) / (1.0 + doubled)
    return tl.where(scores < 0, -magnitude, magnitude) * cap
