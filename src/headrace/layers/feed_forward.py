"""Gated feed-forward (Shazeer 2020), dense or as a mixture of experts."""

from __future__ import annotations

import torch

from ..kernels.operators import Operators
from .build import Builder


class FeedForward:
    """`{prefix}{gate,up,down}_proj`."""

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
        self.down = build.matrix(
            f"{prefix}down_proj.weight", rows=[arch.hidden], width=arch.intermediate, role="linear"
        )

    def __call__(self, ops: Operators, x: torch.Tensor) -> torch.Tensor:
        """x [N, D] → [N, D]."""
        inner = ops.gated(ops.linear(x, self.gate_up, None), self.activation)
        return ops.linear(inner, self.down, None)


class MixtureOfExperts:
    """`{prefix}gate` routes each token to `active` of `{prefix}experts.N.{gate,up,down}_proj`."""

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

    def __call__(self, ops: Operators, x: torch.Tensor) -> torch.Tensor:
        """x [N, D] → [N, D]."""
        router = ops.linear(x, self.router, None)
        return ops.moe(
            x, router, self.gate_up, self.down, self.active, self.normalise, self.activation
        )
