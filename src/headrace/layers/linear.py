"""A matrix with its bias."""

from __future__ import annotations

from ..kernels.arrays import Array
from ..kernels.operators import Operators
from .build import Builder


class Linear:
    """`{names}.weight` and `{names}.bias`, several one below the other."""

    def __init__(self, build: Builder, *names: str, rows: int, width: int) -> None:
        each = [rows] * len(names)
        weights = (f"{name}.weight" for name in names)
        self.weight = build.matrix(*weights, rows=each, width=width, role="linear")
        self.bias = build.vector(*(f"{name}.bias" for name in names), sizes=each)

    def __call__(self, ops: Operators, x: Array) -> Array:
        """x [N, width] → [N, rows · names]."""
        return ops.linear(x, self.weight, self.bias)
