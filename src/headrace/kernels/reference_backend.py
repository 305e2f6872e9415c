"""The reference as a backend, the last choice."""

from __future__ import annotations

from ..base.config import Decision
from .backend import Question
from .program import Provider

ELEMENTWISE = ("embed", "add", "gated", "select", "activate", "part", "scatter", "window")
"""Kinds without sums, whose rows are therefore invariant on every device."""


class ReferenceBackend:
    """Backend for every kind of node wherever torch runs. It refuses row invariance outside the
    CPU, and the quantisation of weights."""

    name = "ref"

    def supports(self, kind: str, question: Question) -> str | None:
        if question.deterministic and question.device != "cpu" and kind not in ELEMENTWISE:
            return "torch's kernels for this device sum in an order that depends on the batch"
        if question.quantise != "auto" and kind == "linear":
            return f"does not quantise weights to {question.quantise}"
        return None

    def decisions(self) -> list[Decision]:
        """Return the cost of serving with the reference."""
        cost = "call by call, with weights in 2 or 4 bytes: slower by far than any kernels"
        return [Decision("reference", "PyTorch", cost)]

    def build(self, question: Question) -> Provider:
        # Local: only users of the reference import torch.
        import torch

        from .reference import ReferenceOperators

        return ReferenceOperators(getattr(torch, question.dtype))
