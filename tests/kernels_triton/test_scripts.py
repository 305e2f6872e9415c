"""The two scripts run: what `make gpu-dry` and `make gpu-bench` start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, interpreted: bool) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_kernels_of_a_model_compile_without_faults(tmp_path: Path) -> None:
    file = tmp_path / "dry.json"
    run(
        "gpu_dry.py", "--architecture", "sm_90", "--model", "0", "--json", str(file),
        interpreted=False,
    )  # fmt: skip
    found = json.loads(file.read_text())
    names = {row["kernel"] for row in found["kernels"]}
    assert {"attention_decode._split_kernel", "sampling._draw_kernel"} <= names
    prefill = [r for r in found["kernels"] if r["kernel"] == "attention_prefill._prefill_kernel"]
    assert {row["matrix"] for row in prefill} == {"warpgroup"}
    assert all(row["spills"] == 0 for row in found["kernels"])


@pytest.mark.slow
def test_the_benchmark_runs_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    run("gpu_bench.py", "--tiny", "--json", str(file), interpreted=True)
    found = json.loads(file.read_text())
    assert not found.get("failures")
    sections = found["sections"]
    assert all(row["right"] for row in sections["kernels"])
    assert sections["tiny"]["decode"]
    assert sections["tiny"]["prefill"]
    assert sections["tiny"]["saturation"]["output_tokens"] > 0
    assert found["facts"]["interpreted"]
