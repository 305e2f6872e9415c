"""Gated feed-forward (Shazeer 2020), dense or as a mixture of experts."""

from __future__ import annotations

import torch

from ..kernels.operators import Operators
from ..kernels.weights import Weight
from .build import Builder
from .codes import Activations, coded, product


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

    def __call__(self, ops: Operators, x: Activations) -> torch.Tensor:
        """x [N, D] → [N, D]."""
        inner = product(ops, x, self.gate_up, None)
        codes = coded(ops, self.down)
        if codes is not None:
            return codes.linear_codes(
                codes.gated_codes(inner, self.activation, self.down), self.down, None
            )
        return ops.linear(ops.gated(inner, self.activation), self.down, None)


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

    def __call__(self, ops: Operators, x: Activations) -> torch.Tensor:
        """x [N, D] → [N, D]."""
        assert isinstance(x, torch.Tensor), "the router and the experts read the same values"
        router = ops.linear(x, self.router, None)
        return ops.moe(
            x, router, self.gate_up, self.down, self.active, self.normalise, self.activation
        )
