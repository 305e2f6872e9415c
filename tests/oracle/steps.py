"""Programs of models that are a function, for tests of what runs whole steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from headrace.kernels.model import Model
from headrace.kernels.operators import KvCache, StepBatch
from headrace.kernels.program import CallByCall, Program, want
from headrace.kernels.weights import LoraWeight


class Forwards:
    """A model of its forward pass alone."""

    def __init__(self, forward: Callable[..., tuple[Any, Any]], weights: int = 10**12) -> None:
        self._forward, self._weights = forward, weights

    def multiplied(self) -> int:
        return self._weights

    def forward(
        self, ops: Any, batch: StepBatch, cache: KvCache, adding: Any, *, every: bool, times: Any
    ) -> tuple[Any, Any]:
        assert adding is None
        assert times is None
        return self._forward(ops, batch, cache)

    def further(self, *, every: bool) -> list[str]:
        return []


def plain(
    ops: Any,
    model: Model | Forwards,
    cache: KvCache,
    additions: Mapping[tuple[str, ...], LoraWeight] | None = None,
) -> CallByCall:
    return CallByCall(cast(Model, model), ops, cache, ops.drawing, additions)


def results(program: Program, batch: StepBatch) -> tuple[Any, Any]:
    """Hidden states of the rows that sample, and logits."""
    found = program.step(batch, want(logits=True, hidden="sampled"))
    return found.hidden, found.logits


def likeliest(program: Program, batch: StepBatch) -> tuple[Any, Any]:
    """Hidden states of the rows that sample, and their most likely tokens."""
    found = program.step(batch, want("best", hidden="sampled"))
    return found.hidden, found.tokens
