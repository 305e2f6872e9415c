"""Block tables on a device: deltas of all groups in one copy, the later one where two differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.base.step import NULL_BLOCK, BlockWrite, GroupShape, PoolShape
from headrace.worker import rows as module
from headrace.worker.rows import BlockTables

POOL = PoolShape(4, (GroupShape("full", (0,), None, 500), GroupShape("window", (1,), 16, 500)))


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> tuple[BlockTables, BlockTables]:
    """Tables in arrays of the host, and in tensors as on a device."""
    of_host = BlockTables(3, 40, POOL, "cpu")
    monkeypatch.setattr(module, "_on", lambda _, values: torch.from_numpy(values))
    return of_host, BlockTables(3, 40, POOL, "cpu")


def test_tensors_hold_what_arrays_hold(both: tuple[BlockTables, BlockTables]) -> None:
    writes = [
        BlockWrite(1, 0, 0, [5, 6, 7]),
        BlockWrite(2, 1, 3, [8]),
        BlockWrite(1, 1, 0, [9, 10]),
        BlockWrite(1, 0, 1, [11]),
    ]
    for tables in both:
        tables.write(writes)
    for array, tensor in zip(both[0].tables, both[1].tables, strict=True):
        assert isinstance(tensor, torch.Tensor)
        assert np.array_equal(array, tensor.numpy())
    assert both[0].tables[0][1][:4].tolist() == [5, 11, 7, NULL_BLOCK]
    for tables in both:
        tables.release([1])
    for array, tensor in zip(both[0].tables, both[1].tables, strict=True):
        assert np.array_equal(array, tensor.numpy())
    assert both[0].tables[1][2].tolist() == [NULL_BLOCK] * 3 + [8] + [NULL_BLOCK] * 6
    with pytest.raises(AssertionError, match="too long"):
        both[1].write([BlockWrite(0, 0, 9, [1, 2])])
