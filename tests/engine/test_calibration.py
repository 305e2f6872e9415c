"""The first start of a machine measures it in a moment, and keeps what it found."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.base.config import EngineOptions
from headrace.base.errors import OptionError
from headrace.base.hardware import cpu
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.engine.loop import calibration
from headrace.engine.loop.build import build
from headrace.engine.loop.calibration import calibrate_quickly, needs_calibration
from headrace.kernels.cpu.library import Team, allocate
from headrace.kernels.cpu.panels import packed_bytes
from headrace.loader import open_model
from headrace.roofline.efficiency import CPU_EFFICIENCY, of_products
from headrace.roofline.hardware import Hardware
from headrace.roofline.hardware_files import find_hardware, load_hardware, save_hardware
from headrace.roofline.machine import calibration_path, this_hardware


def machine(fp32: float, int8: float, bandwidth: float = 2e10) -> Hardware:
    rates, efficiency = {"float32": fp32, "int8": int8}, of_products(0.9, 0.5, 0.95)
    return Hardware(
        "CPU", rates, bandwidth, 2**34, kind="cpu", efficiency=efficiency, source="first start"
    )


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's load, what is measured can be true."""
    monkeypatch.setattr(Hardware, "implausible", lambda _self: None)
    monkeypatch.setattr(calibration, "undisturbed", lambda _used, _offered: True)


def test_what_cannot_be_true_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "undisturbed", lambda _used, _offered: True)
    true = replace(machine(2e11, 8.5e11), source=calibration.SOURCE)
    for slow in (machine(3.8e7, 8.7e10), machine(1.1e10, 4e11), machine(2e11, 8e11, 1e6)):
        assert slow.implausible()
        rounds = [slow, slow, true]
        monkeypatch.setattr(calibration, "quick_hardware", lambda _n, r=rounds: r.pop(0))
        calibrate_quickly(1)
        assert not rounds
        assert not needs_calibration("cpu")
        assert this_hardware("cpu") == replace(true, cache_bandwidth=slow.cache_bandwidth)
        calibration_path().unlink()
        monkeypatch.setattr(calibration, "quick_hardware", lambda _n, s=slow: s)
        calibrate_quickly(1)
        assert needs_calibration("cpu"), "kept, but the next start tries again"
        assert this_hardware("cpu") is None
        with pytest.raises(OptionError, match="cannot be true"):
            find_hardware("this", calibration_path())


def test_what_was_measured_beside_others_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used until then, and the better figures are kept."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    alone = [False]
    monkeypatch.setattr(calibration, "undisturbed", lambda _used, _offered: alone.pop(0))
    monkeypatch.setattr(calibration, "quick_hardware", lambda _n: machine(1e11, 4e11, 1.2e10))
    calibrate_quickly(1)
    assert not alone
    kept = this_hardware("cpu")
    assert kept is not None
    assert kept.source == calibration.BUSY
    assert not needs_calibration("cpu"), "not at every start of a busy machine"
    os.utime(calibration_path(), (0, 0))
    assert needs_calibration("cpu")
    fitted = replace(kept.efficiency, overlap=0.5, source="fitted")
    save_hardware(kept.fitted(fitted), calibration_path())
    os.utime(calibration_path(), (0, 0))
    assert not needs_calibration("cpu"), "what was fitted stays"
    save_hardware(kept, calibration_path())
    os.utime(calibration_path(), (0, 0))
    alone.append(True)
    monkeypatch.setattr(calibration, "quick_hardware", lambda _n: machine(9e10, 8e11, 3e10))
    calibrate_quickly(1)
    assert not needs_calibration("cpu")
    kept = this_hardware("cpu")
    assert kept is not None
    assert (kept.rates["float32"], kept.rates["int8"], kept.bandwidth) == (1e11, 8e11, 3e10)


def test_what_is_read_comes_from_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that the largest cache holds would be read from there."""
    sizes, allocate = [], calibration.allocate
    monkeypatch.setattr(calibration, "allocate", lambda size: sizes.append(size) or allocate(size))
    monkeypatch.setattr(calibration, "last_level_cache", lambda: 64 * 2**20)
    calibration.quick_hardware(1)
    assert sizes == [128 * 2**20, calibration.CACHED_BYTES]


def test_half_of_the_processors_is_a_disturbed_measurement() -> None:
    assert calibration.undisturbed(1.9, 2.0)
    assert not calibration.undisturbed(1.0, 2.0)


@pytest.mark.usefixtures("undisturbed")
def test_the_first_start_measures_and_the_second_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert needs_calibration("cpu")
    assert not needs_calibration("cuda"), "GPUs are known by name"
    calibrate_quickly(1)
    assert not needs_calibration("cpu")
    found = this_hardware("cpu")
    assert found is not None
    assert found == load_hardware(calibration_path())
    assert 0 < found.bandwidth < 2e12  # How slow it may seem is a matter of the machine's load.
    assert found.cache_bandwidth >= found.bandwidth
    assert 0 < found.rates["float32"] < 1e14
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


def test_assumed_shares_are_todays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of an earlier version has what that assumed of its own kernels."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    kept = machine(1e11, 4e11, 1.2e10).fitted(CPU_EFFICIENCY)
    save_hardware(kept.fitted(replace(CPU_EFFICIENCY, product_memory=0.37)), calibration_path())
    assert this_hardware("cpu") == kept


def test_shares_are_those_of_our_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: the bytes and operations of a call, over its time, over the ceiling."""
    seconds = {"Q4_0": 0.01, "F32": 0.002, "few": 0.0}
    calls: list[tuple[str, int]] = []
    product = calibration.product

    def noted(team: Team, kind: str, *given: Any) -> tuple[Any, int, float]:
        made, size, work = product(team, kind, *given)
        rows = given[1]
        calls.append((kind, rows))
        assert work == 2.0 * rows * 1024 * (size / packed_bytes(kind, (16, 1024)) * 16)
        seconds["few"] = size / 1.5e10 if rows == 1 else seconds["few"]
        made()  # It is a real product of real panels.
        return (lambda: seconds["few" if rows == 1 else kind]), size, work

    monkeypatch.setattr(calibration, "product", noted)
    monkeypatch.setattr(calibration, "timed", lambda work: work())
    monkeypatch.setattr(calibration, "best", lambda rate: rate())
    monkeypatch.setattr(calibration, "of_products", lambda *found: found)
    work = 2.0 * calibration.ROWS * calibration.OUTPUTS * 1024
    rates = {"int8": 2 * work / 0.01, "float32": work / 0.002 / 0.96}
    found = calibration.shares(Team(1), allocate(2**24), rates, 2e10)
    assert calls == [("Q4_0", 1), ("Q4_0", calibration.ROWS), ("F32", calibration.ROWS)]
    assert found == pytest.approx((0.75, 0.5, 0.96))


def test_shares_of_a_disturbed_measurement_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "quick_hardware", lambda _n: machine(1e11, 4e11))
    monkeypatch.setattr(calibration, "undisturbed", lambda _used, _offered: False)
    found, alone = calibration.measured(1)
    assert not alone
    assert found.efficiency == CPU_EFFICIENCY
    kept = calibration.better(found, machine(9e10, 3e11))
    assert kept.efficiency == of_products(0.9, 0.5, 0.95)
    assert kept.rates["float32"] == 1e11


def test_what_a_version_without_measured_shares_kept_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    kept = replace(machine(1e11, 4e11), source=calibration.SOURCE)
    save_hardware(kept, calibration_path())
    assert not needs_calibration("cpu")
    save_hardware(kept.fitted(CPU_EFFICIENCY), calibration_path())
    assert needs_calibration("cpu")
