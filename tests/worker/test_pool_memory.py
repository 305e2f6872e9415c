"""Memory of the arrays of a pool."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.base.step import ArrayShape, GroupShape, PoolShape
from headrace.worker.kv_tensors import HUGE, PoolMemory, allocate_kv


@pytest.mark.parametrize(("heads", "huge"), [(48, True), (2, False)])
def test_only_large_states_lie_in_huge_pages(heads: int, huge: bool) -> None:
    arrays = (
        ArrayShape("inputs", (10, 64), "float32"),
        ArrayShape("state", (heads, 128, 64), "float32"),
    )
    shape = PoolShape(16, (GroupShape("states", (0, 1), None, 5, arrays, state=True),))
    memory = PoolMemory()
    memory.begin(shape)
    cache = allocate_kv(shape, "cpu", host=True, memory=memory)
    for layer in (0, 1):
        state = np.asarray(cache.states[layer].state)
        assert state.shape == (5, heads, 128, 64)
        assert (state.ctypes.data % HUGE == 0) == huge
        assert not state.any()
        state[1:3] = layer + 1
    sums = [int(np.asarray(cache.states[layer].state).sum()) for layer in (0, 1)]
    assert sums == [2 * heads * 128 * 64, 4 * heads * 128 * 64]
    assert not np.asarray(cache.states[1].inputs).any()
