"""The memory plan held against a device that says what the test wants."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from headrace.base.errors import DoesNotFit
from headrace.base.groups import graph_groups, pool_bytes
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.kernels.cuda_graphs import GraphProgram, null_step
from headrace.kernels.operators import KvCache, KvLayer, StepLimits
from headrace.kernels.reference import ReferenceOperators
from headrace.loader.open import open_model
from headrace.models.registry import describe
from headrace.roofline.memory import plan_memory
from headrace.worker import Worker, WorkerOptions, step_memory
from headrace.worker.device_memory import check
from headrace.worker.kv_tensors import allocate_kv
from headrace.worker.step_memory import SAMPLING_COPIES, CudaMemory
from oracle.driving import pool_of
from oracle.steps import Forwards, plain
from tiny import families
from tiny.kept import Kept

GIB = 2**30


class FakeMemory:
    """Says numbers in turn; the last one for ever."""

    def __init__(self, *free: int, growth: int = 0) -> None:
        self._free, self._growth = list(free), growth
        self.watched = 0

    def free(self) -> int:
        return self._free.pop(0) if len(self._free) > 1 else self._free[0]

    def watch(self) -> None:
        self.watched += 1

    def growth(self) -> int:
        return self._growth


@pytest.fixture(scope="module")
def files(kept: Kept):
    return open_model(str(kept(families.make, "gemma3")))


def make_worker(files, memory: FakeMemory) -> Worker:
    options = WorkerOptions(
        kernels="ref", threads=1, rows=5, step_tokens=48, max_context=128, dtype="float32"
    )
    return Worker(files, options, memory=memory)


class Device(FakeMemory):
    """Answers, or is lost."""

    lost = False

    def free(self) -> int:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().free()


@pytest.mark.parametrize(
    ("error", "lost", "cause"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False, "memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), False, "memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False, "memory"),
        (RuntimeError("CUDA error: an illegal memory access"), True, "device"),
        (ValueError("a bug"), False, ""),
    ],
)
def test_a_failed_step_says_what_the_device_lacks(files, error, lost: bool, cause: str) -> None:
    memory = Device(20 * GIB, growth=10_000)
    worker = make_worker(files, memory)
    worker.allocate(pool_of(worker, 8))

    def fail(*given: object) -> None:
        memory.lost = lost
        raise error

    worker.text.program.step = fail
    plan = StepPlan(
        0,
        [0],
        [0],
        [2],
        [True],
        admitted=[Admission(0, 0, [5, 6], 2, 0, RequestSpec(SamplingParams(temperature=0), 0))],
        blocks=[BlockWrite(0, group, 0, [1]) for group in range(len(worker._pool.groups))],
    )
    result = worker.execute(plan)
    assert result.cause == cause
    assert str(error).split()[0] in (result.error or "")


def test_the_largest_step_is_measured(files) -> None:
    memory = FakeMemory(20 * GIB, growth=10_000)
    worker = make_worker(files, memory)
    assert memory.watched == 1
    assert worker.facts.step_bytes == 10_000 + SAMPLING_COPIES * 5 * families.VOCAB * 4
    assert worker.facts.device_memory == 20 * GIB
    assert "measure_step" in worker.facts.phases


def test_a_prompt_beside_long_contexts_is_among_the_largest_steps() -> None:
    """Its attention holds parts of sums for every entry and every part of the longest context."""
    layer = KvLayer(torch.zeros(4, 1, 16, 8), torch.zeros(4, 1, 16, 8))
    step = null_step(48, KvCache([layer], [0], [None]), 128, decodes=4)
    assert step.query_starts.tolist() == [0, 44, 45, 46, 47, 48]
    assert step.lengths.tolist() == [44, 128, 128, 128, 128]
    assert step.positions.tolist() == [*range(44), 127, 127, 127, 127]
    assert (step.max_count, step.max_length) == (44, 128)
    assert step.groups[0].tables.shape == (5, 8)
    assert len(step.tokens) == len(step.groups[0].slots) == 48


def test_what_is_as_planned_starts_in_silence(files, caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker(files, FakeMemory(20 * GIB, 20 * GIB))
    worker.allocate(pool_of(worker, 20))
    with caplog.at_level(logging.WARNING):
        worker.warm_up()
    assert not caplog.records


def test_a_difference_is_logged_with_its_numbers(files, caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker(files, FakeMemory(20 * GIB, 18 * GIB))
    worker.allocate(pool_of(worker, 20))
    with caplog.at_level(logging.WARNING):
        worker.warm_up()
    (record,) = caplog.records
    assert "2.00 GiB are in use" in record.getMessage()
    assert "KV pool" in record.getMessage()


def test_no_room_for_the_largest_step_is_refused(files) -> None:
    worker = make_worker(files, FakeMemory(20 * GIB, GIB, growth=2 * GIB))
    worker.allocate(pool_of(worker, 20))
    with pytest.raises(DoesNotFit, match=r"largest step takes 2.00 GiB.*--kv-memory"):
        worker.warm_up()


def test_a_device_that_runs_out_while_it_starts(files, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(files, FakeMemory(4 * GIB, GIB))

    def refuse(*_: object, **__: object) -> KvCache:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("headrace.worker.part.allocate_kv", refuse)
    with pytest.raises(DoesNotFit, match=r"4.00 GiB were free before.*--kv-memory 3072MiB"):
        worker.allocate(pool_of(worker, 20))


@pytest.mark.parametrize(
    ("integrated", "free"), [(0, 2 * GIB), (1, 40 * GIB)], ids=["its own", "the host's"]
)
def test_file_pages_are_free_where_a_gpu_has_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch, integrated: int, free: int
) -> None:
    """Jetson and DGX Spark: after a model's files are read their pages fill what is free, and the
    driver tells the rest alone."""
    properties = SimpleNamespace(is_integrated=integrated)
    for name, value in (
        ("synchronize", None),
        ("empty_cache", None),
        ("mem_get_info", (2 * GIB, 64 * GIB)),
        ("get_device_properties", properties),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(step_memory, "cpu", lambda: SimpleNamespace(available=40 * GIB))
    assert CudaMemory("cuda").free() == free


def test_small_differences_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check(FakeMemory(10 * GIB), 30 * GIB, {"KV pool": 19 * GIB, "graphs": GIB // 2}, GIB)
    assert not caplog.records


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_pool_bytes_are_those_of_the_tensors(files, kv_dtype: str) -> None:
    pool = PoolShape(16, graph_groups(describe(files.arch), kv_dtype, 7))
    cache = allocate_kv(pool, "cpu")
    held = 0
    for layer in cache.layers:
        held += layer.k.nbytes + layer.v.nbytes
        if layer.k_scale is not None and layer.v_scale is not None:
            held += layer.k_scale.nbytes + layer.v_scale.nbytes
    assert pool_bytes(pool) == held


def test_the_plan_counts_what_was_measured(files) -> None:
    def plan(**measured: int):
        return plan_memory(
            files.arch,
            weight_bytes=10_000_000,
            available=400_000_000,
            rows=4,
            step_tokens=64,
            max_context=256,
            dtype="float32",
            **measured,
        )

    formula, seen = plan(), plan(step_bytes=50_000_000, graph_bytes=30_000_000)
    assert seen.activation_bytes == 50_000_000
    assert dict(seen.parts())["graphs"] == 30_000_000
    assert formula.graph_bytes == 0
    assert sum(size for _, size in seen.parts()) == 400_000_000
    with pytest.raises(DoesNotFit):
        plan(step_bytes=50_000_000, graph_bytes=390_000_000)


class Growing:
    """A maker whose first graph takes 1000 bytes for the memory that all share, each 10 more."""

    def __init__(self) -> None:
        self.captured = 0

    def capture(self, run):
        run()
        self.captured += 1
        return run

    def memory(self) -> int:
        return 1000 * (self.captured > 0) + 10 * self.captured


def test_a_few_graphs_tell_what_all_will_take() -> None:
    layer = KvLayer(torch.zeros(4, 1, 16, 8), torch.zeros(4, 1, 16, 8))

    def forward(ops, batch, cache):
        return torch.zeros(len(batch.tokens), 8), torch.zeros(len(batch.sample_rows), 5)

    def program(maker: Growing) -> GraphProgram:
        limits = StepLimits(tokens=600, entries=20, max_context=1500)
        ops, cache = ReferenceOperators(torch.float32), KvCache([layer], [0], [None])
        return GraphProgram(plain(ops, Forwards(forward), cache), limits, maker)

    few, all_of_them = program(Growing()), program(Growing())
    all_of_them.capture()
    assert few.estimate() == all_of_them.facts.bytes
    assert few._maker.captured == 3
