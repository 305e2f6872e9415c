"""Steps of a worker with the first or middle layers of a model, which yield no tokens.

It keeps the same tables as every worker. It learns the sampled tokens from the stage that has the
head, before a plan comes that computes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np

from ..base.step import StepPlan, StepResult
from ..kernels.operators import KvCache, StepBatch
from ..kernels.program import EVERY, Program
from .features import RowFeature
from .kv_tensors import copy_blocks
from .rows import BlockTables, Rows


@dataclass(slots=True)
class StageSteps:
    """State that all steps of such a worker share; see `step.Steps`."""

    program: Program
    rows: Rows
    tables: BlockTables
    cache: KvCache
    batch: Callable[[StepPlan, list[int] | None], StepBatch]
    check: bool
    """Flag: verify every plan."""
    adapters: RowFeature | None
    """Adapters of its layers' products."""
    inference: Callable[[], AbstractContextManager[object]]
    """Context in which a step with tensors runs."""

    def launch(self, plan: StepPlan, begin: float) -> StepResult:
        """Do a step that began at `begin`."""
        with self.inference():
            return self._launch(plan, begin)

    def _launch(self, plan: StepPlan, begin: float) -> StepResult:
        if self.check:
            plan.verify(rows=len(self.rows.held))
        self.rows.release(plan.released)
        self.tables.release(plan.released)
        if self.adapters is not None:
            self.adapters.release(plan.released)
        self.tables.write(plan.blocks)
        for admission in plan.admitted:
            self.rows.admit(admission)
            if self.adapters is not None:
                self.adapters.admit(admission)
        if self.check:
            self.rows.check_starts(plan)
        self.rows.note_computed(plan)
        if plan.copies:
            copy_blocks(self.cache, plan.copies)
        silent = replace(plan, samples=[False] * len(plan.rows))
        self.program.step(self.batch(silent, None), EVERY)
        nothing: list[list[int]] = [[] for _ in plan.rows]
        return StepResult(plan.number, nothing, seconds=time.perf_counter() - begin)

    def learn(self, rows: list[int], places: list[int], tokens: list[list[int]]) -> None:
        """Write the tokens that a plan brought, for rows that it has not released, at these
        places."""
        for row, place, new in zip(rows, places, tokens, strict=True):
            if new:
                self.rows.append(np.array([row]), np.array([place]), np.array(new))
