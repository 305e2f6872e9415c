"""The first start of a machine measures it in a moment, and keeps what it found."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace.engine.calibration import calibrate_quickly, needs_calibration
from headrace.roofline.hardware import load_hardware
from headrace.roofline.machine import calibration_path, this_hardware


def test_the_first_start_measures_and_the_second_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert needs_calibration("cpu")
    assert not needs_calibration("cuda"), "GPUs are known by name"
    begin = time.perf_counter()
    calibrate_quickly(1)
    assert time.perf_counter() - begin < 30
    assert not needs_calibration("cpu")
    found = this_hardware("cpu")
    assert found is not None
    assert found == load_hardware(calibration_path())
    assert 1e8 < found.bandwidth < 2e12
    assert found.cache_bandwidth >= found.bandwidth
    assert 1e8 < found.rates["float32"] < 1e14
    assert "first start" in found.source


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    calibrate_quickly(1)
    assert this_hardware("cpu") is None
