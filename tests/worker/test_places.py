"""Bytes of blocks go where they belong, through the library and without it."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.worker import places


@pytest.mark.parametrize("native", [True, False])
def test_blocks_come_back(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(places, "library", lambda: None)
    arrays = [np.zeros((5, 5), np.int16), np.zeros((5, 7), np.uint8)]
    of = places.Places(arrays)
    assert of.nbytes == 17
    data = np.arange(1, 35, dtype=np.uint8).tobytes()
    of.fill([1, 4], data)
    first, second = data[:10] + data[20:27], data[10:20] + data[27:34]
    assert [b"".join(of.parts(block)) for block in (1, 4)] == [first, second]
    assert not any(array[[0, 2, 3]].any() for array in arrays)
    gathered = bytearray(34)
    of.gather([1, 4], memoryview(gathered))
    assert gathered == data
    other = places.Places([np.zeros((2, 5), np.int16), np.zeros((2, 7), np.uint8)])
    other.copy([0, 1], of, [4, 0])
    assert b"".join(other.parts(0)) == second
    assert b"".join(other.parts(1)) == bytes(17)
    with pytest.raises(AssertionError):
        other.copy([0], of, [5])


@pytest.mark.parametrize("size", [1, 15, 64, 79, 333])
def test_a_copy_past_the_caches_is_whole(size: int) -> None:
    arrays = [np.random.default_rng(size).integers(0, 256, (20, size), np.uint8)]
    others = [np.zeros((20, size), np.uint8)]
    places.Places(others).copy([3, 4, 5, 9, 1], places.Places(arrays), [7, 8, 9, 2, 0])
    assert (others[0][[3, 4, 5, 9, 1]] == arrays[0][[7, 8, 9, 2, 0]]).all()
    assert not others[0][[0, 2, 6, 7, 8, *range(10, 20)]].any()
