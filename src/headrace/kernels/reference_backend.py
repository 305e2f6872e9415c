"""The reference as a backend: the last to be asked, and it says yes."""

from __future__ import annotations

from ..base.config import Decision
from .backend import Question
from .program import Provider

ELEMENTWISE = ("embed", "add", "gated", "select", "activate", "part")
"""Kinds that sum over nothing."""


class ReferenceBackend:
    """Supports everything, everywhere that torch runs; row invariance only on the CPU."""

    name = "ref"

    def supports(self, kind: str, question: Question) -> str | None:
        if question.deterministic and question.device != "cpu" and kind not in ELEMENTWISE:
            return "torch's kernels for this device sum in an order that depends on the batch"
        if question.quantise != "auto" and kind == "linear":
            return f"does not quantise weights to {question.quantise}"
        return None

    def decisions(self) -> list[Decision]:
        """What it costs that it serves something."""
        cost = "call by call, with weights in 2 or 4 bytes: slower by far than any kernels"
        return [Decision("reference", "PyTorch", cost)]

    def build(self, question: Question) -> Provider:
        # Deferred: importing torch is for those who use it.
        import torch

        from .reference import ReferenceOperators

        return ReferenceOperators(getattr(torch, question.dtype))
