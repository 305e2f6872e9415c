"""A worker driven by the real scheduler, without an engine around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.base.groups import graph_groups, slot_groups
from headrace.base.request import Request, SequenceDelta
from headrace.base.sampling import SamplingParams
from headrace.base.spec import SEEDS, RequestSpec
from headrace.base.step import PoolShape, StepPlan, StepResult, TokenLogprobs
from headrace.kv import KvManager
from headrace.models.registry import describe
from headrace.sched import Limits, Scheduler
from headrace.worker import Worker


def pool_of(
    worker: Worker,
    blocks: int,
    block_size: int = 16,
    slots: int | None = None,
    span: int | None = None,
) -> PoolShape:
    """`blocks` blocks of each of its groups, and slots of the part that drafts: one for each row,
    of a whole context, unless told otherwise."""
    kv_dtype, options = worker._resolved.kv_dtype, worker.options
    groups = graph_groups(describe(worker.arch), kv_dtype, blocks)
    if options.draft_model is None:
        return PoolShape(block_size, groups)
    assert worker.drafter is not None
    graph, count = worker.drafter.part.model.graph, slots or options.rows
    drafting = slot_groups(graph, kv_dtype, count, span or options.max_context)
    return PoolShape(block_size, groups, drafting)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    cached: int = 0
    preemptions: int = 0


class Driver:
    """Requests in, answers out; every plan and result is kept."""

    def __init__(
        self,
        worker: Worker,
        *,
        blocks: int = 600,
        block_size: int = 16,
        step_tokens: int = 512,
        rows: int | None = None,
        prefix_cache: bool = True,
        drafts: int = 0,
        depth: Literal[1, 2] = 1,
        slots: int | None = None,
        span: int | None = None,
    ) -> None:
        self.worker = worker
        pool = pool_of(worker, blocks, block_size, slots, span)
        worker.allocate(pool)
        self.kv = KvManager(pool, prefix_cache=prefix_cache)
        limits = Limits(
            rows=rows or worker.options.rows,
            step_tokens=step_tokens,
            max_context=worker.options.max_context,
            max_waiting=1024,
            depth=depth,
            drafts=drafts,
        )
        self.scheduler = Scheduler(limits, self.kv)
        self.answers: dict[tuple[str, int], Answer] = {}
        self.plans: list[StepPlan] = []
        self._flying: deque[tuple[StepPlan, StepResult]] = deque()

    def add(
        self,
        name: str,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        stop_ids: tuple[int, ...] = (),
        salt: str = "",
        **wishes: Any,
    ) -> None:
        """`wishes`: further fields of the spec. Its grammar must be compiled."""
        sampling = sampling or SamplingParams(temperature=0, max_tokens=64)
        spec = RequestSpec(sampling, (sampling.seed or 0) % SEEDS, stop_ids, **wishes)
        self.scheduler.add(Request(name, list(prompt), spec, cache_salt=salt))

    def step(self, change: Callable[[StepResult], StepResult] = lambda result: result) -> bool:
        """Plan and compute while there is room in flight, then take the oldest result."""
        while (plan := self.scheduler.schedule()) is not None:
            self.plans.append(plan)
            self._flying.append((plan, change(self.worker.execute(plan))))
        if not self._flying:
            return False
        self._read(self.scheduler.update(*self._flying.popleft()))
        return True

    def run(self) -> dict[tuple[str, int], Answer]:
        while self.scheduler.has_work:
            assert self.step(), "work is left, but no plan"
        self.scheduler.check_integrity()
        return self.answers

    def ask(self, prompt: list[int], sampling: SamplingParams | None = None) -> Answer:
        """One request, alone in the batch."""
        name = f"ask {len(self.answers)}"
        self.add(name, prompt, sampling)
        return self.run()[name, 0]

    def _read(self, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            answer = self.answers.setdefault((delta.request_id, delta.choice), Answer())
            answer.tokens += delta.tokens
            answer.logprobs += delta.logprobs or []
            answer.prompt_logprobs += delta.prompt_logprobs or []
            answer.finish = delta.finish or answer.finish
            answer.error = delta.error or answer.error
            answer.cached = delta.cached or answer.cached
            answer.preemptions = delta.preemptions or answer.preemptions
