"""The executor of a model whose layers are divided among processes: stages, on one host or several.

A stage is a process, or ranks that share its layers. The first rank runs in the engine's process,
every other one in its own. Every rank gets every plan and keeps all tables. Rows of the residual
stream go from one stage to the next inside their native steps, from each rank to the corresponding
one. The last stage samples, and the engine uses its results. As many plans are in flight as there
are stages, each with different sequences: while a stage computes one plan, the next stage computes
the previous plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...base.errors import EngineDead
from ...base.step import StepPlan, StepResult
from .. import messages
from ..loop.executor import StageWorker, StepFuture
from .group import GroupExecutor, same


class StagesExecutor(GroupExecutor):
    """The stages of one layout; see `Executor`."""

    def submit(self, plan: StepPlan) -> StepFuture:
        coming = [other.submit(plan) for other in self._others]
        done = self._own.submit(plan).result()
        if done.error is not None:
            self._check()
        return _Staged(self, plan, done, coming)

    def _compare(self, left: int) -> None:
        """Compare nothing: stages compute different parts of a step."""

    def landed(self, plan: StepPlan, own: StepResult, coming: list[StepFuture]) -> StepResult:
        """Return the result of the oldest step in flight. Raises `EngineDead` if a stage failed."""
        results = [own, *(one.result() for one in coming)]
        for rank, each in enumerate(results):
            if each.error is not None:
                self._check()
                stage, of = rank // self._each, len(results) // self._each
                raise EngineDead(f"stage {stage} of {of} failed: {each.error}")
        found, first = results[-self._each], len(results) - self._each
        for rank, each in enumerate(results[first:], first):
            same(each, found, rank, first)
        places = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
        assert isinstance(self._own.worker, StageWorker)
        self._own.worker.learn(plan.rows, places, found.tokens)
        for other in self._others[: self._each - 1]:
            other.ask(messages.Learn(plan.rows, places, found.tokens))
        found.seconds = max(each.seconds for each in results)
        return found


@dataclass(frozen=True, slots=True)
class _Staged:
    """A step sent to all stages."""

    _executor: StagesExecutor
    _plan: StepPlan
    _own: StepResult
    _coming: list[StepFuture]

    def result(self) -> StepResult:
        return self._executor.landed(self._plan, self._own, self._coming)
