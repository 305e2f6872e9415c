"""RMS norm (Zhang and Sennrich 2019), alone or joined with the residual addition before it."""

from __future__ import annotations

from ..kernels.arrays import Array
from ..kernels.operators import Operators, Unnormed
from ..kernels.weights import Weight
from .build import Builder
from .codes import Activations, coded, fused


class Norm:
    def __init__(self, build: Builder, name: str) -> None:
        self.weight = build.vector(f"{name}.weight", sizes=[build.arch.hidden])
        self.eps = build.arch.norm_eps
        self.offset = build.arch.norm_offset

    def __call__(self, ops: Operators, x: Array) -> Array:
        """x [N, D] → normed."""
        return ops.rms_norm(x, self.weight, self.eps, self.offset)

    def add_for(
        self,
        ops: Operators,
        x: Array,
        residual: Array | None,
        consumer: Weight | None,
    ) -> tuple[Activations, Array]:
        """As `add`; the norm in the form that its only reader, the product with `consumer`, wants.

        None: it has other readers."""
        if consumer is None:
            return self.add(ops, x, residual)
        if residual is None and fused(ops, consumer, x) is not None:
            return Unnormed(x, self.weight, self.eps, self.offset), x
        codes = coded(ops, consumer)
        if codes is None:
            return self.add(ops, x, residual)
        if residual is None:
            return codes.rms_norm_codes(x, self.weight, self.eps, self.offset, consumer), x
        return codes.add_rms_norm_codes(x, residual, self.weight, self.eps, self.offset, consumer)

    def add(self, ops: Operators, x: Array, residual: Array | None) -> tuple[Array, Array]:
        """→ (norm of x + residual, x + residual); no residual before the first layer."""
        if residual is None:
            return self(ops, x), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps, self.offset)
