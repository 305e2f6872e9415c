"""Tables on a device: what changes goes there with a step's inputs, in one copy; the later one
where two differ."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.sampling import SamplingParams
from headrace.base.step import NULL_BLOCK, BlockWrite, GroupShape, PoolShape
from headrace.worker import Worker, batch
from headrace.worker import rows as module
from headrace.worker.rows import BlockTables
from oracle.driving import Driver

POOL = PoolShape(4, (GroupShape("full", (0,), None, 500), GroupShape("window", (1,), 16, 500)))


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> tuple[BlockTables, BlockTables]:
    """Tables in arrays of the host, and in tensors as on a device."""
    of_host = BlockTables(3, 40, POOL, "cpu")
    monkeypatch.setattr(module, "_on", lambda _, values: torch.from_numpy(values))
    return of_host, BlockTables(3, 40, POOL, "cpu")


def settle(tables: BlockTables) -> None:
    """A step's inputs arrive."""
    tables.deltas.apply(*tables.deltas.take())


def same(both: tuple[BlockTables, BlockTables]) -> bool:
    assert all(isinstance(tensor, torch.Tensor) for tensor in both[1].tables)
    return all(
        np.array_equal(array, tensor.numpy())
        for array, tensor in zip(both[0].tables, both[1].tables, strict=True)
    )


def test_tensors_hold_what_arrays_hold(both: tuple[BlockTables, BlockTables]) -> None:
    writes = [
        BlockWrite(1, 0, 0, [5, 6, 7]),
        BlockWrite(2, 1, 3, [8]),
        BlockWrite(1, 1, 0, [9, 10]),
        BlockWrite(1, 0, 1, [11]),
    ]
    for tables in both:
        tables.write(writes)
        settle(tables)
    assert same(both)
    assert both[0].tables[0][1][:4].tolist() == [5, 11, 7, NULL_BLOCK]
    for tables in both:
        tables.release([1])
        settle(tables)
    assert same(both)
    assert both[0].tables[1][2].tolist() == [NULL_BLOCK] * 3 + [8] + [NULL_BLOCK] * 6
    with pytest.raises(AssertionError, match="too long"):
        both[1].write([BlockWrite(0, 0, 9, [1, 2])])


def test_what_a_failed_plan_left_is_not_its_rows_next_owners(
    both: tuple[BlockTables, BlockTables],
) -> None:
    for tables in both:
        tables.release([0, 2])
        tables.write([BlockWrite(1, 0, 0, [5, 6, 7]), BlockWrite(0, 1, 0, [3])])
        tables.release([1])
        tables.write([BlockWrite(1, 0, 0, [8])])
        settle(tables)
    assert same(both)
    assert both[0].tables[0][1].tolist() == [8] + [NULL_BLOCK] * 9


def test_a_step_is_one_copy_to_the_device(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds when rows come, grow or go: prompts, block tables and released rows are in it
    too."""

    tokens = SamplingParams(temperature=0, max_tokens=12)

    def load(driver: Driver) -> Any:
        for name, length in enumerate((40, 1, 100, 7, 130, 20)):
            driver.add(str(name), [(name + at) % 90 for at in range(length)], tokens)
            driver.step()
        return {name: answer.tokens for name, answer in driver.run().items()}

    expected = load(Driver(worker, blocks=60, step_tokens=64, rows=3))
    copies: list[int] = []

    def counting(copy: Any) -> Any:
        return lambda *given: copies.append(1) or copy(*given)

    for part, copy in ((batch, "all_to_device"), (module, "to_device")):
        monkeypatch.setattr(part, copy, counting(getattr(part, copy)))
    monkeypatch.setattr(module, "_on", lambda _, values: torch.from_numpy(values))
    driver, steps = Driver(worker, blocks=60, step_tokens=64, rows=3), worker._steps
    steps.host = None
    steps.batch = partial(
        batch.make_batch, rows=worker._rows, tables=worker._tables, pool=worker._pool, draws=True
    )
    assert load(driver) == expected
    assert any(plan.released and plan.admitted and plan.blocks for plan in driver.plans)
    assert len(copies) == len(driver.plans)
