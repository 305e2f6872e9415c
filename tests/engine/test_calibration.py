"""The first start of a machine measures it in a moment, and keeps what it found."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace.base.config import EngineOptions
from headrace.base.hardware import cpu
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.engine.build import build
from headrace.engine.calibration import calibrate_quickly, needs_calibration
from headrace.loader import open_model
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


def test_an_engine_predicts_from_its_first_start_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    files = open_model(str(tiny))
    options = EngineOptions(
        model=str(tiny), max_context=64, max_sequences=2, step_tokens=32, threads=1
    )
    for expected in (True, False):
        phases: dict[str, float] = {}
        built = build(options, files, on_phase=phases.__setitem__)
        try:
            built.core.add(Request("one", [5, 6, 7], RequestSpec(SamplingParams(max_tokens=3), 0)))
            while built.core.has_work:
                built.core.turn()
                assert built.core.stats.predicted_seconds > 0
                assert built.core.stats.flops > 0
                assert built.core.stats.bytes > 0
        finally:
            built.close()
        assert ("calibrate" in phases) == expected, "measured once, then kept"
    found = this_hardware("cpu")
    assert found is not None
    assert found.name.endswith(f", {cpu().cores} threads"), "of the machine, not of one start"
