"""Several arrays in one buffer: what a device would see is what was put in."""

from __future__ import annotations

import numpy as np
import torch

from headrace.worker.transfer import all_to_device, fill, places, views

ARRAYS = [
    np.arange(5),
    np.array([7], np.int32),
    np.zeros(0, np.int64),
    np.arange(9, dtype=np.int32),
    np.linspace(0, 1, 3),
    np.arange(3, dtype=np.float32),
]


def test_arrays_come_out_as_they_went_in() -> None:
    starts, total = places(ARRAYS)
    assert all(start % 16 == 0 for start in starts)
    buffer = torch.full((total,), 255, dtype=torch.uint8)
    fill(buffer, ARRAYS, starts)
    for array, found in zip(ARRAYS, views(buffer, ARRAYS, starts), strict=True):
        assert found.numpy().dtype == array.dtype
        assert np.array_equal(found.numpy(), array)


def test_nothing_but_empty_arrays_is_a_buffer_too() -> None:
    empty = [np.zeros(0, np.int64)] * 2
    starts, total = places(empty)
    assert total > 0
    buffer = torch.zeros(total, dtype=torch.uint8)
    fill(buffer, empty, starts)
    assert [len(view) for view in views(buffer, empty, starts)] == [0, 0]


def test_on_the_cpu_nothing_is_packed() -> None:
    found = all_to_device(ARRAYS, torch.device("cpu"))
    assert [tensor.tolist() for tensor in found] == [array.tolist() for array in ARRAYS]
