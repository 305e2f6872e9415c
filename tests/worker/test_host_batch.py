"""Static buffers hold what `make_batch` makes anew, step after step."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, GroupShape, PoolShape, StepPlan
from headrace.kernels.arrays import host
from headrace.kernels.operators import StepBatch, StepLimits
from headrace.worker.batch import make_batch
from headrace.worker.host_batch import HostBatches
from headrace.worker.rows import BlockTables, Rows

CONTEXT, ROWS, STEP, SIZE = 300, 6, 40, 4
POOL = PoolShape(SIZE, (GroupShape("full", (0,), None, 500), GroupShape("window", (1,), 16, 500)))


class Bench:
    """Rows with random tokens and tables, as a worker would have them."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.rows = Rows(ROWS, CONTEXT, "cpu", ("pooling",))
        self.tables = BlockTables(ROWS, CONTEXT, POOL, "cpu")
        limits = StepLimits(STEP, ROWS, CONTEXT)
        self.batches = HostBatches(self.rows, self.tables, POOL, limits)
        for row in range(ROWS):
            self.admit(row)

    def admit(self, row: int, *, pooling: bool = False) -> None:
        if self.rows.held[row]:
            self.rows.release([row])
            self.tables.release([row])
        tokens = self.random.integers(0, 1000, CONTEXT).tolist()
        spec = RequestSpec(SamplingParams(), 0, task="vector" if pooling else "tokens")
        self.rows.admit(Admission(row, row, tokens, 10, 0, spec))
        self.grow(row, 0, -(-CONTEXT // SIZE))

    def grow(self, row: int, first: int, count: int) -> None:
        blocks = self.random.integers(1, 500, count).tolist()
        self.tables.write([BlockWrite(row, group, first, blocks) for group in range(2)])

    def check(self, plan: StepPlan) -> StepBatch:
        ours = self.batches.make(plan)
        new = make_batch(plan, None, self.rows, self.tables, POOL)
        for name in ("tokens", "positions", "query_starts", "lengths", "sample_rows"):
            mine, other = host(getattr(ours, name)), getattr(new, name)
            assert mine.flags.c_contiguous, name
            assert mine.dtype == other.numpy().dtype, name
            assert np.array_equal(mine, other), name
        for mine, other in zip(ours.groups, new.groups, strict=True):
            width = other.tables.shape[1]
            assert np.array_equal(mine.tables[:, :width], other.tables)
            assert host(mine.tables).dtype == other.tables.numpy().dtype
            assert np.array_equal(mine.slots, other.slots)
            assert mine.window == other.window
        assert (ours.max_count, ours.max_length) == (new.max_count, new.max_length)
        return ours


def plan(*entries: tuple[int, int, int, bool]) -> StepPlan:
    """A plan of entries, each (row, start, count, samples)."""
    rows, starts, counts, samples = (list(column) for column in zip(*entries, strict=True))
    return StepPlan(1, rows, starts, counts, samples)


def test_decoding_gets_the_same_object_with_new_numbers() -> None:
    bench = Bench(0)
    seen = set()
    for place in range(3, 30):
        batch = bench.check(plan((4, place, 1, True), (1, place + 7, 1, True)))
        assert batch.fixed
        seen.add(id(batch))
    assert len(seen) <= 2, "only the width of the tables may ask for another one"


def test_tables_that_change_are_read_again() -> None:
    bench = Bench(1)
    bench.check(plan((0, 20, 1, True), (2, 20, 1, True)))
    bench.grow(2, 3, 2)
    bench.check(plan((0, 21, 1, True), (2, 21, 1, True)))
    bench.check(plan((2, 22, 1, True), (0, 22, 1, True)))
    bench.admit(0)
    bench.check(plan((2, 23, 1, True), (0, 23, 1, True)))


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_plans(seed: int) -> None:
    bench = Bench(seed)
    random = bench.random
    for _ in range(60):
        if random.random() < 0.3:
            bench.admit(int(random.integers(ROWS)), pooling=bool(random.random() < 0.3))
        rows = random.permutation(ROWS)[: random.integers(1, ROWS + 1)].tolist()
        decode = random.random() < 0.5
        entries = []
        for row in rows:
            count = 1 if decode else int(random.integers(1, STEP // len(rows) + 1))
            start = int(random.integers(0, CONTEXT - count))
            entries.append((row, start, count, bool(decode or random.random() < 0.7)))
        bench.check(plan(*entries))


def test_a_step_beyond_the_limits_still_gets_its_batch() -> None:
    bench = Bench(2)
    batch = bench.check(plan((0, 3, STEP + 10, True)))
    assert not batch.fixed


@pytest.mark.parametrize("count", [2, 5])
def test_decode_is_make_and_keeps_the_tokens(count: int) -> None:
    bench = Bench(3)
    for place in range(10, 20):
        step = plan(*((row, place + row, 1, True) for row in range(count)))
        batch = bench.batches.decode(step)
        assert batch is not None
        assert bench.check(step) is batch
        new = [1000 + place + row for row in range(count)]
        bench.batches.keep(new)
        for row, token in enumerate(new):
            assert bench.rows.tokens[row, place + row + 1] == token
    other = plan(*((row, 10, 1, True) for row in reversed(range(count))))
    assert bench.batches.decode(other) is batch
    bench.check(other)
    bench.batches.keep(list(range(count)))
    assert bench.rows.tokens[:count, 11].tolist() == list(reversed(range(count)))


def test_what_is_not_a_decoding_step() -> None:
    bench = Bench(4)
    assert bench.batches.decode(plan((0, 3, 1, True), (1, 4, 1, False))) is None
    assert bench.batches.decode(plan((0, 3, 2, True))) is None
