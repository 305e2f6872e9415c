"""The executor of a model that several workers share: ranks, on one host or on several.

Rank 0 runs in the engine's process, every other rank in its own. Every rank is a whole worker: it
gets every plan, keeps all tables, and computes its part of each product. So each has every step's
outputs and draws the same tokens by itself. The engine uses the results of rank 0. The others'
tokens are compared with them a step later, when no request waits for the comparison. If one rank
ends, all do, and the error names it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ...base.cut import even
from ...base.errors import EngineDead, EngineFault, HeadraceError
from ...base.facts import WorkerFacts
from ...base.layout import Layout
from ...base.modelfiles import ModelFiles
from ...base.step import PoolShape, StepPlan, StepResult
from ...base.workeroptions import WorkerOptions
from ...dist.channel import PeerGone
from ...dist.commons import Commons, make_commons
from ...dist.wake import AnyBell, Bell
from .. import messages
from ..loop.executor import Executor, InlineExecutor, StepFuture
from ..loop.real import worker_loader
from ..spawn import tell_parent
from .ends import JoinedEnd, SpawnedEnd, WorkerEnd
from .joining import lead
from .joins import Joins
from .launch import RankPlace
from .multiproc import MultiprocExecutor

SILENT = 10.0
"""Seconds without a sign of life after which a rank of this host is ended. Longer than between
hosts, so that a briefly stopped rank can continue."""


class GroupExecutor:
    """Ranks of one layout; see `Executor`."""

    def __init__(
        self,
        files: ModelFiles,
        settings: WorkerOptions,
        worker: str,
        met: LocalRanks | JoinedRanks,
        layout: Layout,
    ) -> None:
        """`settings`: of one worker. `met`: the other ranks."""
        self._met, stages = met, layout.pp
        settings = replace(settings, dealt=layout.ep, ranks=met.ranks, stages=stages)
        own = met.settings(0, settings)
        self._each = met.ranks // stages
        """Number of ranks with the same layers."""
        self._others = [
            MultiprocExecutor(files, met.settings(rank, settings), end)
            for rank, end in enumerate(met.ends, 1)
        ]
        self._own = InlineExecutor(lambda: worker_loader(worker)(files, own))
        self._bell: AnyBell | None = None
        self._closed = False
        self._unseen: deque[tuple[StepResult, list[StepFuture]]] = deque()
        """Results of rank 0, and the pending ones of the others."""

    @property
    def wake(self) -> Bell:
        assert self._bell is not None
        return self._bell

    def load(self) -> WorkerFacts:
        # On one host rank 0 may have to repack weights, which the others then map.
        first = self._others if self._met.apart else []
        for other in first:
            other.begin_load()
        facts = self._own.load()
        for other in self._others:
            if not first:
                other.begin_load()
            other.loaded()
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
        """Compare the results of the other ranks, except for the last `left` steps."""
        while len(self._unseen) > left:
            result, coming = self._unseen.popleft()
            for rank, one in enumerate(coming, 1):
                other = one.result()
                same(other, result, rank)

    def _check(self) -> None:
        """Raise `EngineDead` if another rank has ended."""
        culprit = self._met.culprit
        if culprit is not None:
            raise self._others[culprit - 1].death()
        for other in self._others:
            if other.end.ended:
                raise other.death()

    def prepare_grammar(self, source: str, owner: str = "") -> bool:
        self._compare(0)  # Their answers about grammars come after their step results.
        done = [other.prepare_grammar(source, owner) for other in self._others]
        return self._own.prepare_grammar(source, owner) and all(done)

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter in all ranks, or in none."""
        self._compare(0)
        all_of_them: list[Executor] = [self._own, *self._others]
        have = []
        try:
            for one in all_of_them:
                one.load_adapter(name, path)
                have.append(one)
        except HeadraceError:
            for one in have:
                one.unload_adapter(name)
            raise

    def unload_adapter(self, name: str) -> None:
        self._compare(0)
        self._own.unload_adapter(name)
        for other in self._others:
            other.unload_adapter(name)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._met.stop()
        if self._bell is not None:
            self._bell.close()
        for other in self._others:
            other.close()
        self._own.close()
        self._met.close()


def same(other: StepResult, result: StepResult, rank: int, first: int = 0) -> None:
    """Raise `EngineDead` if ranks of one pipeline stage sampled different tokens."""
    if (other.tokens, other.error) != (result.tokens, result.error):
        raise EngineDead(f"rank {rank} made other tokens in step {result.number} than rank {first}")


class LocalRanks:
    """Ranks in processes of this host, which share memory."""

    culprit: int | None = None
    """The rank that an all-gather blamed; None here, where ended ranks are noticed in other
    ways."""
    apart = False
    """Whether each has its own copy of the weights."""

    def __init__(self, worker: str, ranks: int) -> None:
        self.ranks = ranks
        self._descriptor = make_commons()
        self._commons = Commons(self._descriptor, ranks, 0)
        self._stopped = False
        spawned = [
            SpawnedEnd(f"rank {rank} of {ranks}", worker, [self._descriptor], SILENT)
            for rank in range(1, ranks)
        ]
        self.ends: list[WorkerEnd] = [*spawned]
        for end in spawned:
            end.on_end(partial(self._over, end))

    def _over(self, end: SpawnedEnd) -> None:
        self._commons.tear()
        if end.killed and not self._stopped:
            tell_parent(f"{end.name} {end.how()}")

    def settings(self, rank: int, whole: WorkerOptions) -> WorkerOptions:
        """Return the settings of a rank; the ranks share the threads of one worker."""
        assert whole.threads is not None
        threads = even(max(whole.threads, self.ranks), self.ranks)
        mine = threads[rank + 1] - threads[rank]
        return replace(whole, rank=rank, threads=mine, commons=self._descriptor)

    def stop(self) -> None:
        """Release all threads that wait for a rank in an all-gather."""
        self._stopped = True
        self._commons.tear()

    def close(self) -> None:
        os.close(self._descriptor)


class JoinedRanks:
    """Ranks that a launcher has started on several hosts; they run until the engine ends."""

    apart = True

    def __init__(
        self, place: RankPlace, mine: Joins, call: Callable[[int], None] = lambda port: None
    ) -> None:
        """Await them; arguments and errors are those of `joining.lead`."""
        self.ranks = place.ranks
        self._circle, channels = lead(place, mine, call=call)
        joined = [
            JoinedEnd(name, channel)
            for name, channel in zip(self._circle.names[1:], channels, strict=True)
        ]
        self.ends: list[WorkerEnd] = [*joined]
        self._circle.calls.append(lambda rank, why: joined[rank - 1].lost(why))
        for rank, why in list(self._circle.lost.items()):
            joined[rank - 1].lost(why)

    @property
    def culprit(self) -> int | None:
        return next(iter(self._circle.lost), self._circle.wire.culprit)

    def settings(self, rank: int, whole: WorkerOptions) -> WorkerOptions:
        return replace(whole, rank=rank, commons=self._circle.descriptor)

    def stop(self) -> None:
        """Report the lost rank, if any, to the other ranks."""
        try:
            self._circle.check()
        except EngineDead as lost:
            for end in self.ends:
                with suppress(PeerGone):
                    end.channel.send(messages.Failed(messages.WireError.of(lost)))

    def close(self) -> None:
        self._circle.close()
