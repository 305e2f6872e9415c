"""Gated feed-forward (Shazeer 2020), dense or as a mixture of experts."""

from __future__ import annotations

from ..kernels.arrays import Array
from ..kernels.operators import Coded, Operators, Unnormed
from ..kernels.weights import Weight
from .build import Builder
from .codes import Activations, Stream, coded, fused, product, product_onto


class FeedForward:
    """`{prefix}{gate,up,down}_proj`."""

    consumer: Weight
    """The one matrix that takes the input."""

    def __init__(self, build: Builder, prefix: str) -> None:
        arch = build.arch
        self.activation = arch.activation
        self.gate_up = build.matrix(
            f"{prefix}gate_proj.weight",
            f"{prefix}up_proj.weight",
            rows=[arch.intermediate, arch.intermediate],
            width=arch.hidden,
            role="linear",
        )
        self.consumer = self.gate_up
        self.down = build.matrix(
            f"{prefix}down_proj.weight", rows=[arch.hidden], width=arch.intermediate, role="linear"
        )

    def __call__(self, ops: Operators, x: Activations, residual: Array | None = None) -> Stream:
        """x [N, D] → ([N, D], residual), or their sum."""
        joined = fused(ops, self.gate_up, x)
        if joined is not None:
            assert not isinstance(x, Coded)
            inner = joined.linear_gated(x, self.gate_up, self.activation)
            return product_onto(ops, inner, self.down, None, residual)
        both = product(ops, x, self.gate_up, None)
        codes = coded(ops, self.down)
        if codes is not None:
            inner_codes = codes.gated_codes(both, self.activation, self.down)
            return codes.linear_codes(inner_codes, self.down, None), residual
        return product_onto(ops, ops.gated(both, self.activation), self.down, None, residual)


class MixtureOfExperts:
    """`{prefix}gate` routes each token to `active` of `{prefix}experts.N.{gate,up,down}_proj`."""

    consumer: None = None
    """The router and the experts read the same values."""

    def __init__(self, build: Builder, prefix: str) -> None:
        arch, moe = build.arch, build.arch.moe
        assert moe is not None
        self.active, self.normalise = moe.active, moe.normalise
        self.activation = arch.activation
        self.router = build.matrix(
            f"{prefix}gate.weight", rows=[moe.experts], width=arch.hidden, role="linear"
        )
        experts = [f"{prefix}experts.{expert}." for expert in range(moe.experts)]
        self.gate_up = [
            build.matrix(
                f"{expert}gate_proj.weight",
                f"{expert}up_proj.weight",
                rows=[moe.intermediate, moe.intermediate],
                width=arch.hidden,
                role="moe",
            )
            for expert in experts
        ]
        self.down = [
            build.matrix(
                f"{expert}down_proj.weight", rows=[arch.hidden], width=moe.intermediate, role="moe"
            )
            for expert in experts
        ]

    def __call__(self, ops: Operators, x: Activations, residual: Array | None = None) -> Stream:
        """x [N, D] → ([N, D], residual)."""
        assert not isinstance(x, Coded | Unnormed), (
            "the router and the experts read the same values"
        )
        router = ops.linear(x, self.router, None)
        mixed = ops.moe(
            x, router, self.gate_up, self.down, self.active, self.normalise, self.activation
        )
        return mixed, residual
