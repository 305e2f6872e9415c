"""Runs a model's step: call by call, or as the program that the backend made of it."""

from __future__ import annotations

import torch

from ..kernels.operators import GreedyProgram, KvCache, Operators, StepBatch, StepLimits
from ..models.registry import Model


class Runner:
    """A model bound to its operators and its KV."""

    def __init__(
        self, model: Model, operators: Operators, cache: KvCache, limits: StepLimits
    ) -> None:
        self._model = model
        self._operators = operators
        self._cache = cache
        self._program = operators.compile(model.forward, cache, limits)
        self._greedy = self._program if isinstance(self._program, GreedyProgram) else None

    @property
    def whole(self) -> bool:
        """Does a step run as a program of the backend?"""
        return self._program is not None

    def run(
        self, batch: StepBatch, operators: Operators | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """→ hidden [N, D], fp32 logits [R, V]; valid until the next call.

        `operators`: for this step only, call by call, in place of the model's own.
        """
        if operators is not None:
            return self._model.forward(operators, batch, self._cache)
        if self._program is not None:
            return self._program(batch)
        return self._model.forward(self._operators, batch, self._cache)

    def greedy(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `GreedyProgram.greedy`; None also where the program only gives logits."""
        return None if self._greedy is None else self._greedy.greedy(batch)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """fp32 logits of further rows of the last step."""
        return self._model.logits(self._operators, hidden, rows)
