"""Runs a model's step: call by call, or as the program that the backend made of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..kernels.arrays import Array
from ..kernels.interpret import Adding
from ..kernels.model import Model
from ..kernels.operators import (
    AdaptedProgram,
    AdaptingOperators,
    ChoosingProgram,
    DrawingProgram,
    GreedyProgram,
    KvCache,
    Operators,
    StepBatch,
    StepLimits,
)
from ..kernels.weights import LoraWeight


class Runner:
    """A model bound to its operators and its KV."""

    def __init__(
        self,
        model: Model,
        operators: Operators,
        cache: KvCache,
        limits: StepLimits,
        additions: Mapping[tuple[str, ...], LoraWeight] | None = None,
    ) -> None:
        """`additions`: what adapters may add to products, by the names of its tensors."""
        self._model = model
        self._operators = operators
        self._cache = cache
        self._program = operators.compile(model, cache, limits)
        self._adapted: AdaptedProgram | None = None
        if additions and isinstance(operators, AdaptingOperators):
            self._adapted = operators.compile_adapted(
                model, cache, limits, additions, self._program
            )
        self._greedy = self._program if isinstance(self._program, GreedyProgram) else None
        self._drawing = self._program if isinstance(self._program, DrawingProgram) else None
        self._choosing = self._program if isinstance(self._program, ChoosingProgram) else None

    @property
    def whole(self) -> bool:
        """Does a step run as a program of the backend?"""
        return self._program is not None

    @property
    def chooses(self) -> bool:
        """Are there steps for which the program chooses the tokens (`greedy`, `draw`)?"""
        return self._greedy is not None or self._drawing is not None

    def run(self, batch: StepBatch, adding: Adding | None = None) -> tuple[Array, Array]:
        """→ hidden and fp32 logits of `Model.forward`; valid until the next call.

        `adding`: what this step adds to its products, call by call.
        """
        if adding is not None:
            return self._model.forward(self._operators, batch, self._cache, adding)
        if self._program is not None:
            return self._program(batch)
        return self._model.forward(self._operators, batch, self._cache)

    def adapted(self, batch: StepBatch, slots: npt.NDArray[np.int32]) -> tuple[Array, Array] | None:
        """As `run`, with the adapters of `slots` [N]; None where the backend has no program that
        adds them: then `run`, adding them."""
        if self._adapted is None:
            return None
        batch.adapters = slots
        try:
            return self._adapted(batch)
        finally:
            batch.adapters = None

    def greedy(self, batch: StepBatch) -> tuple[Array, Array] | None:
        """As `GreedyProgram.greedy`; None also where the program only gives logits."""
        return None if self._greedy is None else self._greedy.greedy(batch)

    def choose(self, batch: StepBatch) -> tuple[Array, Array] | None:
        """As `ChoosingProgram.choose`; None also where the program only gives logits."""
        return None if self._choosing is None else self._choosing.choose(batch)

    def draw(
        self, batch: StepBatch, rules: npt.NDArray[np.void]
    ) -> tuple[Array, Array, Array] | None:
        """As `DrawingProgram.draw`; None also where the program only gives logits."""
        return None if self._drawing is None else self._drawing.draw(batch, rules)

    def logits(self, hidden: Array, rows: Array) -> Array:
        """fp32 logits of further rows of the last step."""
        return self._model.logits(self._operators, self._operators.select(hidden, rows))
