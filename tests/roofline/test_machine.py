"""This machine among the known hardware, and its model's steps predicted from the file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.hardware import CpuFacts
from headrace.base.step import StepPlan
from headrace.bench.calibrate import from_figures
from headrace.engine.loop.prediction import case_of, step_predictor, tensor_bytes
from headrace.loader import open_model
from headrace.roofline.hardware import DEVICES
from headrace.roofline.hardware_files import save_hardware
from headrace.roofline.machine import calibration_path, gpu_named, this_hardware
from headrace.roofline.weights import total_bytes

FIGURES = {
    "bandwidth": 23e9,
    "cache_bandwidth": 60e9,
    "float32": 2e11,
    "int8": 9e11,
    "bfloat16": 5e10,
    "launch_seconds": 3e-6,
}


def test_gpus_by_their_drivers_names() -> None:
    for name, key in (
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
    ):
        assert gpu_named(name) is DEVICES[key]
    assert gpu_named("Radeon VII") is None


def test_calibration_is_kept_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert this_hardware("cpu") is None
    facts = CpuFacts("Some CPU @ 2 GHz", frozenset(), 2, 2, 2**34, 2**33)
    made = from_figures(facts, FIGURES)
    assert "bfloat16" not in made.rates, "slower than fp32, so not a type to compute in"
    save_hardware(made, calibration_path())
    assert this_hardware("cpu") == made


@pytest.mark.model
def test_the_default_models_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_model("qwen2.5-coder-0.5b")
    sizes, format = tensor_bytes(files)
    assert len(sizes) > 200
    case = case_of(files, dtype="float32", kv_dtype="float32")
    assert case.weights.format == format
    # The file is weights but for a few megabytes of metadata.
    assert total_bytes(files.arch, case.weights) == pytest.approx(491_400_064, rel=0.02)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert step_predictor(files, device="cpu", dtype="float32", kv_dtype="float32") is None
    facts = CpuFacts("Some CPU", frozenset(), 2, 2, 2**34, 2**33)
    save_hardware(from_figures(facts, FIGURES), calibration_path())
    predict = step_predictor(files, device="cpu", dtype="float32", kv_dtype="float32")
    assert predict is not None
    decode = predict(StepPlan(0, [0], [500], [1], [True]))
    prompt = predict(StepPlan(1, [0], [0], [512], [True]))
    # All of the file is 21 ms at this bandwidth; the head, a quarter of it, is read by its bounds.
    assert 0.015 < decode.seconds < 0.0214
    assert decode.bytes > 390e6
    assert 0.3 < prompt.seconds < 2
    assert prompt.flops > 512 * 0.71e9
