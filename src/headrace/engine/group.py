"""The executor of a model that several worker processes share: ranks, on one host.

Every rank is a whole worker: it gets every plan, keeps all tables, and computes its part of each
product, so that all of them have every step's outputs and draw the same tokens by themselves. What
comes back of rank 0 is the result; that the others' tokens are the same is looked at in each step.
Where one rank ends, all do, and the error names it.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.cut import even
from ..base.errors import EngineDead, EngineFault
from ..base.facts import WorkerFacts
from ..base.modelfiles import ModelFiles
from ..base.step import PoolShape, StepPlan, StepResult
from ..dist.commons import Commons, make_commons
from ..dist.wake import Bell
from . import messages
from .executor import StepFuture
from .multiproc import MultiprocExecutor


class GroupExecutor:
    """Ranks of one layout; see `Executor`."""

    def __init__(
        self, files: ModelFiles, settings: dict[str, Any], worker: str, ranks: int
    ) -> None:
        """`settings`: of one worker, whose threads the ranks share."""
        self._descriptor = make_commons()
        self._commons = Commons(self._descriptor, ranks, 0)
        shares = even(max(settings["threads"], ranks), ranks)
        self._ranks: list[MultiprocExecutor] = []
        for rank in range(ranks):
            mine = {
                **settings,
                "ranks": ranks,
                "rank": rank,
                "commons": self._descriptor,
                "threads": shares[rank + 1] - shares[rank],
            }
            name = f"rank {rank} of {ranks}"
            executor = MultiprocExecutor(files, mine, worker, name=name, keep=[self._descriptor])
            self._ranks.append(executor)
        for executor in self._ranks:
            executor.join(self._ranks)
        self._bell: _AnyBell | None = None

    @property
    def wake(self) -> Bell:
        assert self._bell is not None
        return self._bell

    def load(self) -> WorkerFacts:
        # The first may have weights to repack, and keeps them for the others to map.
        facts, *_ = [executor.load() for executor in self._ranks]
        self._bell = _AnyBell([executor.wake for executor in self._ranks])
        return facts

    def allocate(self, pool: PoolShape) -> None:
        self._all(messages.Allocate(pool))

    def warm_up(self) -> None:
        self._all(messages.WarmUp())

    def _all(self, message: messages.Allocate | messages.WarmUp) -> None:
        for executor in self._ranks:
            executor.ask(message)
        for executor in self._ranks:
            executor.answered()

    def submit(self, plan: StepPlan) -> StepFuture:
        return _Joined([executor.submit(plan) for executor in self._ranks])

    def prepare_grammar(self, source: str, owner: str = "") -> bool:
        done = [executor.prepare_grammar(source, owner) for executor in self._ranks]
        return all(done)

    def load_adapter(self, name: str, path: str) -> None:
        raise EngineFault("ranks serve no adapters")

    def unload_adapter(self, name: str) -> None:
        """There are none."""

    def close(self) -> None:
        if self._descriptor < 0:
            return
        self._commons.tear()  # Who waits for a rank at an exchange waits no longer.
        if self._bell is not None:
            self._bell.close()
        for executor in self._ranks:
            executor.close()
        os.close(self._descriptor)
        self._descriptor = -1


def in_processes(
    files: ModelFiles, settings: dict[str, Any], worker: str, ranks: int
) -> MultiprocExecutor | GroupExecutor:
    """The executor of a worker in a process of its own, or of several that share the model."""
    if ranks == 1:
        return MultiprocExecutor(files, settings, worker)
    return GroupExecutor(files, settings, worker, ranks)


@dataclass(slots=True)
class _Joined:
    """One result of a step that all ranks computed."""

    _coming: Sequence[StepFuture]

    def result(self) -> StepResult:
        first, *others = [coming.result() for coming in self._coming]
        for rank, other in enumerate(others, 1):
            if other.tokens != first.tokens and not (first.error or other.error):
                raise EngineDead(
                    f"rank {rank} made other tokens than rank 0 in step {first.number}"
                )
            first.error = first.error or other.error
        return first


@dataclass(slots=True)
class _AnyBell:
    """Rings when one of several does."""

    _bells: Sequence[Bell]
    _poll: select.epoll = field(default_factory=select.epoll)

    def __post_init__(self) -> None:
        for bell in self._bells:
            self._poll.register(bell.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._poll.fileno()

    def clear(self) -> bool:
        rung = [bell.clear() for bell in self._bells]
        return any(rung)

    def close(self) -> None:
        self._poll.close()
