"""How far the CPU kernels are from a model's file: no farther than docs/kernels.md says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import kernel_distance as measured  # noqa: E402

from headrace.base.config import DEFAULT_MODEL  # noqa: E402

RECORDED = json.loads((ROOT / "benchmarks/results/kernel_distance.json").read_text())
MARGIN = {"mean": 1.15, "p99": 1.5}
"""Bits are those of every machine; the text is that of a Python, whose next one may say more."""


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", [DEFAULT_MODEL, "smollm2-135m"])
def test_distances_are_the_recorded_ones(model: str) -> None:
    texts = measured.texts(model)
    wanted = measured.said(model, "ref", "float32", texts)
    assert len(wanted.chosen) == RECORDED[model]["tokens"]
    for kv_dtype in (measured.DEFAULT_KV, "int8", "k8v4"):
        found = measured.distance(measured.said(model, "cpu", kv_dtype, texts), wanted)
        recorded = RECORDED[model]["distances"][f"KV {kv_dtype}"]
        print(model, kv_dtype, found)
        for each, margin in MARGIN.items():
            assert 0 < found[each] <= margin * recorded[each], (kv_dtype, each)
        assert abs(found["nll, %"]) < 1


def test_the_page_has_what_was_recorded() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    _, _, rest = page.partition(measured.BEGIN)
    assert rest.partition(measured.END)[0].strip() == measured.as_table(RECORDED)


def test_a_distance() -> None:
    wanted = measured.Said(np.log([0.5, 0.25, 0.5]), np.array([1, 2, 3]))
    got = measured.Said(wanted.chosen + np.array([0.1, 0.0, -0.3]), np.array([1, 2, 4]))
    found = measured.distance(got, wanted)
    assert found["mean"] == pytest.approx(0.4 / 3)
    assert found["largest"] == pytest.approx(0.3)
    assert found["nll, %"] == pytest.approx(100 * 0.2 / -wanted.chosen.sum())
    assert found["greedy"] == 1
    assert not any(measured.distance(wanted, wanted).values())
