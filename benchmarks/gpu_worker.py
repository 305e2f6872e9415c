"""The real worker and the real scheduler on a model of random weights, without files or servers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_models import BLOCK, random_weights

from headrace.base.arch import ModelArch
from headrace.base.groups import graph_groups, pool_bytes
from headrace.base.modelfiles import ModelFiles
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan, StepResult
from headrace.kv import KvManager
from headrace.models.registry import describe
from headrace.sched import Limits, Scheduler
from headrace.worker import Worker, WorkerOptions, loading


@dataclass(frozen=True, slots=True)
class Setup:
    """One model as it is measured."""

    name: str
    arch: ModelArch
    weights: str = "bfloat16"
    kv: str = "bfloat16"
    dtype: str = "bfloat16"
    device: str = "cuda"
    kernels: str = "triton"
    deterministic: bool = False
    rows: int = 256
    step_tokens: int = 8192
    max_context: int = 8704


def make_worker(setup: Setup) -> Worker:
    """A worker whose weights come from a generator instead of a file."""
    files = ModelFiles(setup.name, "safetensors", Path("."), (), setup.arch, {}, None)
    dtype = getattr(torch, setup.dtype)

    def load_weights(files: ModelFiles) -> object:
        return random_weights(setup.arch, device=setup.device, weights=setup.weights, dtype=dtype)

    with patch.object(loading, "load_weights", load_weights):
        return Worker(
            files,
            WorkerOptions(
                device=setup.device,
                dtype=setup.dtype,
                kv_dtype=setup.kv,
                kernels=setup.kernels,
                deterministic=setup.deterministic,
                quantise="fp8" if setup.weights == "fp8" else "auto",
                rows=setup.rows,
                step_tokens=setup.step_tokens,
                max_context=setup.max_context,
            ),
        )


def pool_of(worker: Worker, blocks: int) -> PoolShape:
    """`blocks` blocks of each of its groups."""
    return PoolShape(BLOCK, graph_groups(describe(worker.arch), worker._resolved.kv_dtype, blocks))


def block_bytes(setup: Setup) -> int:
    """KV of one block in all layers."""
    return pool_bytes(PoolShape(BLOCK, graph_groups(describe(setup.arch), setup.kv, 1)))


class Filled:
    """Rows of a worker that hold `context` tokens each, as if they had been computed."""

    def __init__(self, worker: Worker, setup: Setup, batch: int, context: int, room: int) -> None:
        """`room`: tokens that can be decoded."""
        self._worker, self._batch = worker, batch
        self._at = context
        self._number = 0
        blocks = -(-(context + room + 1) // BLOCK)
        params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
        groups = len(worker._pool.groups)
        self._admitted = [
            Admission(
                row,
                row,
                [1 + (row * 7 + i) % 100 for i in range(context + 1)],
                context + 1,
                0,
                RequestSpec(params, 0),
            )
            for row in range(batch)
        ]
        self._writes = [
            BlockWrite(row, group, 0, list(range(1 + row * blocks, 1 + (row + 1) * blocks)))
            for row in range(batch)
            for group in range(groups)
        ]

    @staticmethod
    def blocks(batch: int, context: int, room: int) -> int:
        return 1 + batch * -(-(context + room + 1) // BLOCK)

    def plan(self) -> StepPlan:
        """The next decode step of every row."""
        first, self._number = self._number == 0, self._number + 1
        plan = StepPlan(
            self._number,
            rows=list(range(self._batch)),
            starts=[self._at] * self._batch,
            counts=[1] * self._batch,
            samples=[True] * self._batch,
            admitted=self._admitted if first else [],
            blocks=self._writes if first else [],
        )
        self._at += 1
        return plan

    def release(self) -> None:
        with torch.inference_mode():
            self._worker._rows.release(list(range(self._batch)))
            self._worker._tables.release(list(range(self._batch)))


@dataclass(slots=True)
class Load:
    """What a run of requests gave."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    steps: int
    device_seconds: float
    """Sum of the steps' times, as the worker says."""
    schedule_seconds: float
    """The scheduler's work, most of it while the device computes."""
    gaps: list[float] = field(default_factory=list)
    """Seconds that the device waited before each step."""

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def gap_us(self) -> float:
        """The median."""
        return 1e6 * sorted(self.gaps)[len(self.gaps) // 2] if self.gaps else 0.0


def run_load(
    worker: Worker,
    setup: Setup,
    blocks: int,
    *,
    prompt: int,
    output: int,
    seconds: float,
    ramp_seconds: float,
    depth: int = 2,
) -> Load:
    """A closed loop at saturation: as many sequences as there are rows, always.

    The first ones end at staggered times, so that steps mix prompts and decoding as they do in a
    service. Counting starts after `ramp_seconds`, once every row is taken. `depth` steps are in
    flight, as with the engine's option of that name.
    """
    kv = KvManager(worker._pool, prefix_cache=False)
    rows = min(setup.rows, max(1, (blocks - 1) * BLOCK // (prompt + output + BLOCK)))
    sizes = {"step_tokens": setup.step_tokens, "max_context": setup.max_context}
    scheduler = Scheduler(Limits(rows=rows, **sizes, max_waiting=1 << 20, depth=depth), kv)
    added = 0

    def add() -> None:
        nonlocal added
        share = (added % rows + 1) / rows if added < rows else 1.0
        params = SamplingParams(
            temperature=0, max_tokens=max(1, round(output * share)), ignore_eos=True
        )
        ids = [
            1 + (added * 13 + place * 7) % (setup.arch.vocab_size - 1) for place in range(prompt)
        ]
        scheduler.add(Request(f"r{added}", ids, RequestSpec(params, added)))
        added += 1

    for _ in range(rows):
        add()
    load = Load(0.0, 0, 0, 0, 0.0, 0.0)
    begin = time.perf_counter()
    counting_from: float | None = None
    flying: deque[tuple[StepPlan, float, Callable[[], StepResult]]] = deque()
    while True:
        now = time.perf_counter()
        if counting_from is None and now - begin >= ramp_seconds:
            counting_from = now
        if counting_from is not None and now - counting_from >= seconds:
            load.seconds = now - counting_from
            for _, _, finish in flying:
                finish()
            return load
        while len(flying) < depth:
            planned = time.perf_counter()
            plan = scheduler.schedule()
            if plan is None:
                break
            spent = time.perf_counter() - planned
            flying.append((plan, spent, worker.launch(plan)))
        assert flying, "saturated, but nothing to do"
        plan, spent, finish = flying.popleft()
        result = finish()
        assert result.error is None, result.error
        for delta in scheduler.update(plan, result):
            if delta.finish is not None:
                add()
        if counting_from is not None:
            load.steps += 1
            load.output_tokens += sum(len(tokens) for tokens in result.tokens)
            load.prompt_tokens += sum(count for count in plan.counts if count > 1)
            load.device_seconds += result.seconds
            load.schedule_seconds += spent
            load.gaps.append(result.gap)
