"""The roofline's counts are those of a hand: weights and KV of a decode, dense, MoE, MLA, MXFP4."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "measuring.py"


def test_counts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("measuring", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "measuring", script)
    spec.loader.exec_module(script)
    rows = script.counts()
    assert len(rows) == 8
    for row in rows:
        assert row["weights"] == pytest.approx(row["weights_by_hand"], rel=0.001), row
        assert row["kv"] == pytest.approx(row["kv_by_hand"], rel=0.003), row
