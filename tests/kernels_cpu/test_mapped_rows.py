"""An embedding table in the mapping of its file: its pages go back, and come again as they were."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.kernels.cpu.mapped import MOST_ROWS, MappedRows
from headrace.kernels.weights import BlockWeight
from headrace.loader.panelfile import _of_mapping

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="smaps and madvise are Linux's")
ROWS, BYTES = 4096, 1024


def resident(address: int) -> int:
    return _of_mapping(address, "Rss:")


@pytest.fixture
def table(tmp_path: Path) -> torch.Tensor:
    path = tmp_path / "table"
    np.random.default_rng(0).integers(0, 256, ROWS * BYTES, np.uint8).tofile(path)
    return torch.from_numpy(np.memmap(path, np.uint8, "c").reshape(ROWS, BYTES))


def test_pages_go_back_after_some_rows_and_hold_what_they_held(table: torch.Tensor) -> None:
    before = table.clone()
    weight = BlockWeight("Q8_0", table, (ROWS, 960), mapped=True)
    rows = MappedRows(weight)
    assert resident(table.data_ptr()) == table.nbytes
    rows.read(MOST_ROWS - 1)
    assert resident(table.data_ptr()) == table.nbytes
    rows.read(1)
    assert resident(table.data_ptr()) == 0
    assert torch.equal(table, before)


def test_what_is_not_the_mapping_of_a_file_stays() -> None:
    data = torch.ones(64, 34, dtype=torch.uint8)
    for weight in (
        BlockWeight("Q8_0", data, (64, 32)),
        BlockWeight("Q8_0", torch.ones(64, 34, dtype=torch.uint8), (64, 32), mapped=False),
    ):
        MappedRows(weight).read(10 * MOST_ROWS)
        assert bool((weight.data == 1).all())
