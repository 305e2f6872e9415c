"""The two scripts run: what `make gpu-dry` and `make gpu-bench` start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_bench  # noqa: E402


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
    run("gpu_bench.py", "--tiny", "--minutes", "9", "--json", str(file), interpreted=True)
    found = json.loads(file.read_text())
    assert not found["failures"]
    assert not found["left_out"]
    parts = found["parts"]
    assert all(row["right"] for row in parts["checks"])
    assert all(row["right"] for row in parts["kernels"]["kernels"])
    assert parts["tiny"]["decode"]
    assert parts["tiny"]["prefill"]
    assert parts["tiny"]["saturation"]["output_tokens"] > 0
    assert parts["transformers"]["rows"]


def part(tmp_path: Path, checks: str) -> tuple[int, dict[str, Any]]:
    """The part "checks" with checks that are not ours."""
    (tmp_path / "gpu_checks.py").write_text(
        "import json, sys, time, os, signal\n"
        "names = json.loads(sys.argv[sys.argv.index('--names') + 1])\n"
        "for name in names:\n"
        "    print(json.dumps({'begins': name}), flush=True)\n"
        f"    {checks}\n"
        "    print(json.dumps({'check': name, 'right': name != 'wrong'}), flush=True)\n"
    )
    file = tmp_path / "bench.json"
    bench = gpu_bench.Bench(1, file, "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_bench, "HERE", tmp_path)
        patch.setattr(gpu_bench, "SHARDS", 1)
        patch.setattr(gpu_bench, "TINY_CHECKS", ("one", "wrong", "dies", "last"))
        bench.run(gpu_bench.Part("checks", 30, 1))
    return bench.finish(), json.loads(file.read_text())


def test_a_wrong_result_and_a_process_that_dies_are_failures_of_their_own(tmp_path: Path) -> None:
    status, found = part(tmp_path, "name == 'dies' and os.kill(os.getpid(), signal.SIGSEGV)")
    assert status == 1
    rows = {row["check"]: row for row in found["parts"]["checks"]}
    assert [rows[name]["right"] for name in ("one", "wrong", "dies", "last")] == [
        True, False, False, True,
    ]  # fmt: skip
    assert "exit -11" in rows["dies"]["failure"]
    assert not found["left_out"]


def test_a_part_that_hangs_is_ended_and_the_rest_named(tmp_path: Path) -> None:
    bench = gpu_bench.Bench(1, tmp_path / "bench.json", "tiny")
    (tmp_path / "gpu_parts.py").write_text(
        "import json, sys, time\n"
        "open(sys.argv[sys.argv.index('--out') + 1], 'w').write(json.dumps({'decode': [1]}))\n"
        "time.sleep(600)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_bench, "HERE", tmp_path)
        bench.run(gpu_bench.Part("llama", 3, 1))
        bench.run(gpu_bench.Part("late", 5, 1000))
    assert bench.finish() == 1
    found = json.loads((tmp_path / "bench.json").read_text())
    assert "not done in 3 s" in found["failures"][0]
    assert found["parts"]["llama"] == {"decode": [1]}
    assert found["left_out"][0].startswith("late:")


ABSENT = (
    "msgspec", "zmq", "fastapi", "starlette", "uvicorn", "psutil", "llguidance", "pydantic",
    "httpx", "pytest", "gguf", "orjson", "uvloop", "prometheus_client", "pynvml", "duckdb",
)  # fmt: skip
"""What is not on a machine that has torch, triton and transformers only."""


def test_the_scripts_need_no_more_than_a_gpu_machine_has() -> None:
    code = (
        "import sys\n"
        f"for name in {ABSENT!r}: sys.modules[name] = None\n"
        f"sys.path[:0] = [{str(ROOT / 'src')!r}, {str(ROOT / 'benchmarks')!r}]\n"
        "import gpu_ahead, gpu_bench, gpu_checks, gpu_dry, gpu_parts\n"
        "import headrace.kernels.triton.tune, headrace.worker, headrace.sched, headrace.loader\n"
        "assert len(gpu_checks.all_checks()) > 80\n"
        "assert set(gpu_checks.SMOKE) <= set(gpu_checks.all_checks())\n"
        "names = {part.name for part in (*gpu_bench.PARTS, *gpu_bench.SMALL_PARTS)}\n"
        "assert names - {'compile', 'checks', 'kernels', 'transformers'} <= set(gpu_parts.SETUPS)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
