"""Bytes of blocks go where they belong, through the library and without it."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.worker import places


@pytest.mark.parametrize("native", [True, False])
def test_a_block_comes_back(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(places, "library", lambda: None)
    arrays = [np.zeros((3, 2, 5), np.int16), np.zeros((3, 7), np.uint8)]
    of = places.Places(arrays)
    assert of.nbytes == 27
    data = np.arange(1, 28, dtype=np.uint8).tobytes()
    of.fill(1, data)
    assert b"".join(of.parts(1)) == data
    assert not any(array[0].any() or array[2].any() for array in arrays)
