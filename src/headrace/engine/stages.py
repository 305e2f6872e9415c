"""The executor of a model whose layers are dealt out to processes: stages, on one host or several.

Stage 0 runs in the engine's process, each other in one of its own. Every stage gets every plan and
keeps all tables; rows of the residual stream go from one to the next inside their native steps. The
last one samples, and its results are the engine's. As many plans are in flight as there are stages,
each of other sequences, so that a stage computes one while the next computes the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.errors import EngineDead
from ..base.step import StepPlan, StepResult
from .executor import StageWorker, StepFuture
from .group import GroupExecutor


class StagesExecutor(GroupExecutor):
    """Stages of one layout; see `Executor`."""

    def submit(self, plan: StepPlan) -> StepFuture:
        coming = [other.submit(plan) for other in self._others]
        done = self._own.submit(plan).result()
        if done.error is not None:
            self._check()
        return _Staged(self, plan, done, coming)

    def _compare(self, left: int) -> None:
        """Stages make different things of a step."""

    def landed(self, plan: StepPlan, own: StepResult, coming: list[StepFuture]) -> StepResult:
        """The result of the oldest step in flight. Raises `EngineDead` where a stage failed."""
        results = [own, *(one.result() for one in coming)]
        for rank, each in enumerate(results):
            if each.error is not None:
                self._check()
                raise EngineDead(f"stage {rank} of {len(results)} failed: {each.error}")
        assert isinstance(self._own.worker, StageWorker)
        self._own.worker.learn(plan, results[-1])
        results[-1].seconds = max(each.seconds for each in results)
        return results[-1]


@dataclass(frozen=True, slots=True)
class _Staged:
    """A step that all stages have been told of."""

    _executor: StagesExecutor
    _plan: StepPlan
    _own: StepResult
    _coming: list[StepFuture]

    def result(self) -> StepResult:
        return self._executor.landed(self._plan, self._own, self._coming)
