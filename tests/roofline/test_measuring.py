"""The roofline's counts are those of a hand: weights and KV of a decode, dense, MoE, MLA, MXFP4."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "measuring.py"


def test_counts_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    command = [sys.executable, str(SCRIPT), "counts", "--json", str(file)]
    subprocess.run(command, check=True, timeout=300)
    rows = json.loads(file.read_text())
    assert len(rows) == 8
    for row in rows:
        assert row["weights"] == pytest.approx(row["weights_by_hand"], rel=0.001), row
        assert row["kv"] == pytest.approx(row["kv_by_hand"], rel=0.003), row
