"""The first start of a machine measures it in a moment, and keeps what it found."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.config import EngineOptions
from headrace.base.errors import OptionError
from headrace.base.hardware import cpu
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.engine import calibration
from headrace.engine.build import build
from headrace.engine.calibration import calibrate_quickly, needs_calibration
from headrace.loader import open_model
from headrace.roofline.hardware import Hardware, find_hardware, load_hardware
from headrace.roofline.machine import calibration_path, this_hardware


def machine(fp32: float, int8: float, bandwidth: float = 2e10) -> Hardware:
    rates = {"float32": fp32, "int8": int8}
    return Hardware("CPU", rates, bandwidth, 2**34, kind="cpu", source="at the first start")


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's load, what is measured can be true."""
    monkeypatch.setattr(Hardware, "implausible", lambda _self: None)


def test_what_cannot_be_true_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    true = machine(2e11, 8.5e11)
    for slow in (machine(3.8e7, 8.7e10), machine(1.1e10, 4e11), machine(2e11, 8e11, 1e6)):
        assert slow.implausible()
        rounds = [slow, slow, true]
        monkeypatch.setattr(calibration, "quick_hardware", lambda _n, r=rounds: r.pop(0))
        calibrate_quickly(1)
        assert not rounds
        assert not needs_calibration("cpu")
        assert this_hardware("cpu") == replace(true, cache_bandwidth=slow.cache_bandwidth)
        monkeypatch.setattr(calibration, "quick_hardware", lambda _n, s=slow: s)
        calibrate_quickly(1)
        assert needs_calibration("cpu"), "kept, but the next start tries again"
        assert this_hardware("cpu") is None
        with pytest.raises(OptionError, match="cannot be true"):
            find_hardware("this", calibration_path())


@pytest.mark.usefixtures("undisturbed")
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


@pytest.mark.usefixtures("undisturbed")
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
