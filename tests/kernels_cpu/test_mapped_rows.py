"""An embedding table in the mapping of its file: its pages go back, and come again as they were."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.kernels.arrays import address
from headrace.kernels.cpu.mapped import MOST_ROWS, MappedRows
from headrace.kernels.weights import BlockWeight, DenseWeight
from headrace.loader.panelfile import _of_mapping

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="smaps and madvise are Linux's")
ROWS, BYTES = 4096, 1024


def resident(address: int) -> int:
    return _of_mapping(address, "Rss:")


@pytest.fixture
def table(tmp_path: Path) -> np.ndarray:
    path = tmp_path / "table"
    np.random.default_rng(0).integers(0, 256, ROWS * BYTES, np.uint8).tofile(path)
    return np.memmap(path, np.uint8, "c").reshape(ROWS, BYTES)


@pytest.mark.parametrize("dense", [True, False])
def test_pages_go_back_after_some_rows_and_hold_what_they_held(
    table: np.ndarray, dense: bool
) -> None:
    before = table.copy()
    weight = DenseWeight(table) if dense else BlockWeight("Q8_0", table, (ROWS, 960))
    rows = MappedRows(weight)
    assert resident(address(table)) == table.nbytes
    rows.read(MOST_ROWS - 1)
    assert resident(address(table)) == table.nbytes
    rows.read(1)
    assert resident(address(table)) == 0
    assert np.array_equal(table, before)


def test_what_is_not_the_mapping_of_a_file_stays() -> None:
    for data in (torch.ones(64, 34, dtype=torch.uint8), np.ones((64, 34), np.uint8)):
        MappedRows(BlockWeight("Q8_0", data, (64, 32))).read(10 * MOST_ROWS)
        assert bool((data == 1).all())
