"""The executor of a model that several workers share: ranks, on one host.

Rank 0 runs in the engine's process, each other in one of its own. Every rank is a whole worker: it
gets every plan, keeps all tables, and computes its part of each product, so that all of them have
every step's outputs and draw the same tokens by themselves. The results of rank 0 are the engine's;
that the others' tokens were the same is looked at a step later, when nobody waits for it. Where one
rank ends, all do, and the error names it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

from ..base.cut import even
from ..base.errors import EngineDead, EngineFault
from ..base.facts import WorkerFacts
from ..base.modelfiles import ModelFiles
from ..base.step import PoolShape, StepPlan, StepResult
from ..dist.commons import Commons, make_commons
from ..dist.wake import AnyBell, Bell
from . import messages
from .executor import InlineExecutor, StepFuture
from .multiproc import MultiprocExecutor
from .real import worker_loader


class GroupExecutor:
    """Ranks of one layout; see `Executor`."""

    def __init__(
        self, files: ModelFiles, settings: dict[str, Any], worker: str, ranks: int
    ) -> None:
        """`settings`: of one worker, whose threads the ranks share."""
        self._descriptor = make_commons()
        self._commons = Commons(self._descriptor, ranks, 0)
        threads = even(max(settings["threads"], ranks), ranks)
        shared = {**settings, "ranks": ranks, "commons": self._descriptor}
        each = [
            {**shared, "rank": rank, "threads": threads[rank + 1] - threads[rank]}
            for rank in range(ranks)
        ]
        self._others = [
            MultiprocExecutor(
                files, mine, worker, name=f"rank {rank} of {ranks}", keep=[self._descriptor]
            )
            for rank, mine in enumerate(each[1:], 1)
        ]
        for other in self._others:
            other.on_end(self._commons.tear)
        self._own = InlineExecutor(lambda: worker_loader(worker)(files, each[0]))
        self._bell: AnyBell | None = None
        self._unseen: deque[tuple[StepResult, list[StepFuture]]] = deque()
        """Results of rank 0, and what comes of the others."""

    @property
    def wake(self) -> Bell:
        assert self._bell is not None
        return self._bell

    def load(self) -> WorkerFacts:
        # Rank 0 may have weights to repack, and keeps them for the others to map.
        facts = self._own.load()
        for other in self._others:
            other.load()
        bells = [self._own.wake, *(other.wake for other in self._others)]
        self._bell = AnyBell(bells, lambda: self._compare(0))
        return facts

    def allocate(self, pool: PoolShape) -> None:
        self._all(messages.Allocate(pool), lambda: self._own.allocate(pool))

    def warm_up(self) -> None:
        self._all(messages.WarmUp(), self._own.warm_up)

    def _all(self, message: messages.Allocate | messages.WarmUp, own: Callable[[], None]) -> None:
        for other in self._others:
            other.ask(message)
        try:
            own()
        except EngineFault:
            self._check()
            raise
        for other in self._others:
            other.answered()

    def submit(self, plan: StepPlan) -> StepFuture:
        self._compare(1)
        coming = [other.submit(plan) for other in self._others]
        done = self._own.submit(plan)
        result = done.result()
        if result.error is not None:
            self._check()
        self._unseen.append((result, coming))
        return done

    def _compare(self, left: int) -> None:
        """Look at the results of the other ranks but for the last `left` steps'."""
        while len(self._unseen) > left:
            result, coming = self._unseen.popleft()
            for rank, one in enumerate(coming, 1):
                other = one.result()
                if (other.tokens, other.error) != (result.tokens, result.error):
                    raise EngineDead(
                        f"rank {rank} made other tokens in step {result.number} than rank 0"
                    )

    def _check(self) -> None:
        """Raise `EngineDead` where another rank has ended."""
        for other in self._others:
            if other.ended:
                raise other.death()

    def prepare_grammar(self, source: str, owner: str = "") -> bool:
        self._compare(0)  # What they say of grammars comes behind what they say of steps.
        done = [other.prepare_grammar(source, owner) for other in self._others]
        return self._own.prepare_grammar(source, owner) and all(done)

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
        for other in self._others:
            other.close()
        self._own.close()
        os.close(self._descriptor)
        self._descriptor = -1


def in_processes(
    files: ModelFiles, settings: dict[str, Any], worker: str, ranks: int, *, share_pool: bool
) -> MultiprocExecutor | GroupExecutor:
    """The executor of a worker in a process of its own, or of several that share the model;
    `share_pool` is for one."""
    if ranks == 1:
        return MultiprocExecutor(files, settings, worker, share_pool=share_pool)
    return GroupExecutor(files, settings, worker, ranks)
