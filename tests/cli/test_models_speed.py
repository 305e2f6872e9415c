"""`headrace models --speed`: predicted tokens a second of the models on this disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import InvalidRequest
from headrace.cli import models_speed
from headrace.loader.cache import CachedModel
from headrace.roofline.hardware import Hardware
from headrace.roofline.hardware_files import save_hardware


def test_each_model_that_writes_has_a_speed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = tmp_path / "machine.json"
    monkeypatch.setattr(models_speed, "calibration_path", lambda: measured)
    found = [
        CachedModel("it", "", "", 1, 1, True, model),
        CachedModel("broken", "", "", 1, 1, True, tmp_path / "absent"),
    ]
    with pytest.raises(InvalidRequest, match="--calibrate"):
        models_speed.predicted(found)
    speeds = []
    for bandwidth in (1e9, 2e9):
        rates = {"float32": 200e9, "int8": 900e9}
        save_hardware(Hardware("it", rates, bandwidth, 16 * 10**9, kind="cpu"), measured)
        (name, speed), *more = models_speed.predicted(found).items()
        assert (name, more) == ("it", [])
        speeds.append(speed)
    assert 1 < speeds[0] < speeds[1]
