"""The two scripts run: what `make gpu-dry` and `make gpu-bench` start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tests/gpu")]

import gpu_absent  # noqa: E402
import gpu_ahead  # noqa: E402
import gpu_bench  # noqa: E402
import gpu_checks  # noqa: E402
import gpu_dry  # noqa: E402
import gpu_hour  # noqa: E402
import gpu_kernels  # noqa: E402
import gpu_measured  # noqa: E402


def run(script: str, *arguments: str, interpreted: bool) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_kernels_of_a_model_compile_without_faults(tmp_path: Path) -> None:
    file = tmp_path / "dry.json"
    run(
        "gpu_dry.py",
        "--architecture",
        "sm_90",
        "--model",
        "0",
        "--json",
        str(file),
        interpreted=False,
    )
    found = json.loads(file.read_text())
    names = {row["kernel"] for row in found["kernels"]}
    assert {
        "attention_decode._split_kernel",
        "sampling._digit_kernel",
        "sampling._token_kernel",
    } <= names
    prefill = [r for r in found["kernels"] if r["kernel"] == "attention_prefill._prefill_kernel"]
    assert {row["matrix"] for row in prefill} == {"warpgroup"}


@pytest.mark.slow
def test_sampling_compiles_nothing_for_another_number_of_rows() -> None:
    code = (
        "import torch\n"
        "from gpu_aot import compiling\n"
        "from headrace.kernels.triton.operators import TritonOperators\n"
        "operators = TritonOperators(torch.bfloat16)\n"
        "with compiling('sm_90') as found:\n"
        "    for rows in (2, 1, 3, 4, 16, 33):\n"
        "        logits = torch.empty(rows, 9000, device='meta')\n"
        "        TritonOperators.warm_draws(operators, logits)\n"
        "        print(rows, len(found))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.partition(" ")[2] for line in done.stdout.splitlines()] == ["13"] * 6


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_benchmark_runs_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    run("gpu_bench.py", "--tiny", "--minutes", "85", "--json", str(file), interpreted=True)
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
    bench = gpu_bench.Bench(10, file, "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_bench, "CHECKS", tmp_path)
        patch.setattr(gpu_bench, "SHARDS", 1)
        patch.setattr(gpu_bench, "TINY_CHECKS", ("one", "wrong", "dies", "last"))
        bench.run(gpu_bench.Part("checks", 300, 1))
    return bench.finish(), json.loads(file.read_text())


def test_a_wrong_result_and_a_process_that_dies_are_failures_of_their_own(tmp_path: Path) -> None:
    status, found = part(tmp_path, "name == 'dies' and os.kill(os.getpid(), signal.SIGSEGV)")
    assert status == 1
    rows = {row["check"]: row for row in found["parts"]["checks"]}
    assert [rows[name]["right"] for name in ("one", "wrong", "dies", "last")] == [
        True,
        False,
        False,
        True,
    ]
    assert "exit -11" in rows["dies"]["failure"]
    assert not found["left_out"]


def longest_shard(delay: float) -> float:
    """Seconds of the process of `gpu_ahead --checks` that compiles longest, with `delay` more for
    each kernel, by the processor's seconds of the last dry run; a core for each."""
    record = json.loads((ROOT / "benchmarks/results/gpu_dry.json").read_text())["checks"]
    shards = [
        [record[name] for name in gpu_checks.SMOKE[number :: gpu_ahead.SHARDS] if name in record]
        for number in range(gpu_ahead.SHARDS)
    ]
    assert sum(check["kernels"] for shard in shards for check in shard) > 100
    return max(
        sum(check["seconds"] + delay * check["kernels"] for check in shard) for shard in shards
    )


def test_half_a_second_more_for_each_kernel_is_within_the_limit() -> None:
    (limit,) = [part.seconds for part in gpu_bench.SMALL_PARTS if part.name == "compile"]
    assert longest_shard(0.0) < longest_shard(0.5) < limit - 5


def test_no_git_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(gpu_bench.commit()) in (0, 40)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_bench.commit() == ""
    assert gpu_bench.Bench(1, tmp_path / "bench.json", "small").record["commit"] == ""


def test_every_check_is_compiled_ahead() -> None:
    """From the checks' own list: on sm_80, which has no fp8, the others."""
    checks = list(gpu_checks.all_checks())
    assert sorted([*gpu_absent.names("sm_90"), *gpu_absent.WORKERS]) == sorted(checks)
    assert "rope and cache, bf16, normed" in gpu_absent.names("sm_80")
    assert not [name for name in gpu_absent.names("sm_80") if "fp8" in name]


@pytest.mark.slow
def test_checks_are_compiled_without_a_gpu(tmp_path: Path) -> None:
    """The first checks of `--smoke`, from an empty cache."""
    code = (
        "import gpu_absent\n"
        "wanted = ['norms', 'experts, dense, 1 tokens']\n"
        "checks = dict(gpu_absent.compiled('sm_90', wanted))\n"
        "assert list(checks) == wanted and all(checks.values())\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT / "benchmarks",
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_late_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, note = tmp_path / "ahead.py", tmp_path / "child"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open('{note}.new', 'w').write(str(child.pid))\n"
        f"os.rename('{note}.new', '{note}')\n"
        "time.sleep(600)\n"
    )

    class Clock:
        """Is beyond every deadline as soon as the part has started its child."""

        def perf_counter(self) -> float:
            while not note.exists():
                time.sleep(0.02)
            return 1e9

    monkeypatch.setattr(gpu_ahead, "__file__", str(script))
    monkeypatch.setattr(gpu_ahead, "time", Clock())
    assert gpu_ahead.run_parts(["checks 0"], "sm_90", 0.0) == 1
    state = Path(f"/proc/{note.read_text()}/stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.02)


def test_a_part_that_hangs_is_ended_and_the_rest_named(tmp_path: Path) -> None:
    bench = gpu_bench.Bench(10, tmp_path / "bench.json", "tiny")
    written = tmp_path / "written"
    (tmp_path / "gpu_parts.py").write_text(
        "import json, sys, time\n"
        "with open(sys.argv[sys.argv.index('--out') + 1], 'w') as out:\n"
        "    out.write(json.dumps({'decode': [1]}))\n"
        f"open({str(written)!r}, 'w').close()\n"
        "time.sleep(600)\n"
    )

    class Clock:
        """Is beyond every deadline as soon as the part has written something."""

        def perf_counter(self) -> float:
            return time.perf_counter() + 1e6 * written.exists()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_bench, "HERE", tmp_path)
        patch.setattr(gpu_bench, "time", Clock())
        bench.run(gpu_bench.Part("llama", 300, 1))
        bench.run(gpu_bench.Part("late", 5, 1000))
    assert bench.finish() == 1
    found = json.loads((tmp_path / "bench.json").read_text())
    assert "not done in 300 s" in found["failures"][0]
    assert found["parts"]["llama"] == {"decode": [1]}
    assert found["left_out"][0].startswith("late:")


def test_a_smoke_run_saves_when_nobody_adds_any_more(tmp_path: Path) -> None:
    parts = gpu_bench.SMALL_PARTS
    for size, expected in (("small", 0), ("real", len(parts))):
        bench = gpu_bench.Bench(1, tmp_path / "bench.json", size)
        with pytest.MonkeyPatch.context() as patch:
            saves = []
            patch.setattr(bench, "save", lambda saves=saves: saves.append(1))
            for work in ("_compile", "_checks", "_alone"):
                patch.setattr(bench, work, lambda name, limit: None)
            bench.run_all(parts)
        assert len(saves) == expected
        bench.finish()
        assert set(json.loads((tmp_path / "bench.json").read_text())["seconds"]) == {
            part.name for part in parts
        }


def test_the_first_hour_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, of which each says its name; one of them fails until a file is there."""
    told, mended = tmp_path / "told", tmp_path / "mended"
    say = f"open({str(told)!r}, 'a').write(sys.argv[1] + chr(10))\n"
    (tmp_path / "gpu_parts.py").write_text(
        f"import pathlib, sys\n{say}"
        f"if sys.argv[1] == 'peers' and not pathlib.Path({str(mended)!r}).exists(): sys.exit(3)\n"
        "open(sys.argv[sys.argv.index('--out') + 1], 'w').write('{}')\n"
    )
    (tmp_path / "tuner.py").write_text(
        f"import sys\n{say}open(sys.argv[sys.argv.index('--write') + 1], 'w').write('{{}}')\n"
    )
    monkeypatch.setattr(gpu_bench, "HERE", tmp_path)
    monkeypatch.setattr(gpu_hour, "TUNER", (str(tmp_path / "tuner.py"),))
    monkeypatch.setattr(gpu_hour, "commit", lambda: "one")
    part = gpu_bench.Part
    calls = {1: (part("kernels", 60, 1), part("peers", 60, 1)), 2: (part("tune", 60, 1),)}
    monkeypatch.setattr(gpu_hour, "CALLS", calls)
    out = tmp_path / "out"

    def call(number: int, *further: str) -> int:
        monkeypatch.setattr(gpu_hour.Path, "glob", lambda self, pattern: iter([Path("nvidia0")]))
        given = ["gpu_hour.py", str(number), "--out", str(out), *further]
        monkeypatch.setattr(sys, "argv", given)
        return gpu_hour.main()

    def parts() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((out / "hour.json").read_text())["parts"]
        return found

    assert call(1) == 1
    assert {name: found["status"] for name, found in parts().items()} == {"kernels": 0, "peers": 1}
    assert json.loads((out / "peers.json").read_text())["failures"]
    mended.touch()
    assert call(2, "--minutes", "0.001") == 1, "no time is left for what is still to do"
    assert call(2) == 0
    assert told.read_text().splitlines() == ["kernels", "peers", "peers", "--write"]
    assert parts()["tune"]["record"] == "tune.json"
    assert (out / "tune.json").exists()
    assert call(2) == 0
    assert len(told.read_text().splitlines()) == 4
    # What another commit measured is measured again.
    monkeypatch.setattr(gpu_hour, "commit", lambda: "two")
    assert call(1) == 0
    assert told.read_text().splitlines()[4:] == ["kernels", "peers"]


def test_every_part_of_the_hour_is_one_that_runs() -> None:
    """Within ten minutes a call; on a CPU too."""
    known = {part.name for part in (*gpu_bench.PARTS, *gpu_bench.TINY_PARTS)}
    for number, parts in gpu_hour.CALLS.items():
        assert sum(part.seconds for part in parts) <= 9.5 * 60, number
        for part in parts:
            assert part.name in known | set(gpu_hour.DRY)


SHORT = (gpu_bench.Part("kernels", 300, 1),)
SLEEP = ["-c", "import time; time.sleep(60)"]


def test_an_interruption_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None:
                raise KeyboardInterrupt
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu_bench.launch(SLEEP, 60)
    assert made[0].poll() == -signal.SIGKILL


def test_an_interruption_ends_the_processes_of_other_threads(tmp_path: Path) -> None:
    bench = gpu_bench.Bench(1, tmp_path / "bench.json", "small")
    codes = []

    def work(number: int) -> None:
        if number == 0:
            raise KeyboardInterrupt
        codes.append(gpu_bench.launch(SLEEP, 60, over=bench._over)[0])

    with pytest.raises(KeyboardInterrupt):
        bench._at_once(work, [0, 1, 2])
    assert set(codes) <= {-signal.SIGKILL}


def test_operands_in_fp8_are_held_against_twice_the_rate() -> None:
    ceilings = gpu_kernels.Ceilings(bandwidth=2.0, rate=10.0)
    for name, seconds in (
        ("product fp8, 16 rows", 2),
        ("experts fp8, 16 rows", 2),
        ("product dense, 16 rows", 4),
        ("experts int4, 1 rows", 4),
        ("add_rms_norm to fp8, 1 rows", 4),
        ("attention decode 1 x 8, float8_e4m3fn KV", 4),
    ):
        kernel = gpu_kernels.Kernel(name, lambda: None, bytes=6.0, flops=40.0)
        assert ceilings.limits(kernel) == {"memory": 3.0, "compute": seconds}


def test_what_cannot_be_a_graph_is_timed_without_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(run: Any, device: str, *, graph: bool = False) -> float:
        run = gpu_kernels._captured(run, device) if graph else run
        return 0.1 if run() == "replayed" else 0.5

    class GraphMaker:
        def __init__(self, device: Any) -> None:
            pass

        def capture(self, run: Any) -> Any:
            if run() is not None:
                raise AssertionError("results are dropped")
            return lambda: "replayed"

    monkeypatch.setattr(gpu_kernels, "measure", measure)
    monkeypatch.setattr(gpu_kernels, "CudaGraphMaker", GraphMaker)
    monkeypatch.setattr(gpu_kernels.torch.cuda, "synchronize", lambda: None)
    kernel = gpu_kernels.Kernel("k", lambda: "run", 1.0, 1.0)
    assert gpu_kernels.measure_kernel(kernel, "cuda") == (0.1, None)

    def refuse(self: GraphMaker, run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(GraphMaker, "capture", refuse)
    seconds, note = gpu_kernels.measure_kernel(kernel, "cuda")
    assert seconds == 0.5
    assert note is not None
    assert "not permitted" in note


ABSENT = (
    "msgspec",
    "fastapi",
    "starlette",
    "uvicorn",
    "psutil",
    "llguidance",
    "pydantic",
    "httpx",
    "pytest",
    "gguf",
    "orjson",
    "uvloop",
    "prometheus_client",
    "pynvml",
    "duckdb",
)
"""Packages missing on a machine that has only torch, triton and transformers."""


def test_the_scripts_need_no_more_than_a_gpu_machine_has() -> None:
    code = (
        "import sys\n"
        f"for name in {ABSENT!r}: sys.modules[name] = None\n"
        f"sys.path[:0] = {[str(ROOT / own) for own in ('src', 'benchmarks', 'tests/gpu')]!r}\n"
        "import gpu_ahead, gpu_bench, gpu_checks, gpu_dry, gpu_parts\n"
        "import headrace.kernels.triton.tune, headrace.worker, headrace.sched, headrace.loader\n"
        "assert len(gpu_checks.all_checks()) > 80\n"
        "assert set(gpu_checks.SMOKE) <= set(gpu_checks.all_checks())\n"
        "names = {part.name for part in (*gpu_bench.PARTS, *gpu_bench.SMALL_PARTS)}\n"
        "own = {'compile', 'checks', 'kernels', 'transformers'}\n"
        "assert names - own <= set(gpu_parts.SETUPS)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_page_says_what_the_dry_run_recorded() -> None:
    record = json.loads((ROOT / "benchmarks/results/gpu_dry.json").read_text())
    page = (ROOT / "docs/gpu-tables.md").read_text()
    said = page.partition(gpu_dry.BEGIN)[2].partition(gpu_dry.END)[0]
    assert said.strip() == gpu_dry.summary_text(record), "make gpu-dry"


def test_a_summary_keeps_faults_spills_and_the_worst() -> None:
    row = {
        "kernel": "product_skinny._product_kernel",
        "architecture": "sm_90",
        "model": "a model",
        "step": "a step",
        "registers": 64,
        "shared": 1024,
        "spills": 0,
        "faults": [],
        "seconds": 0.25,
        "possible": [[1.0, "memory"], [1.0, "memory"]],
    }
    rows = [
        *({**row, "architecture": name} for name in gpu_dry.ARCHITECTURES),
        {**row, "spills": 7, "faults": ["7 spills"]},
        {**row, "possible": [[0.9, "memory"], [0.4, "conversions"]], "registers": 200},
        {**row, "model": gpu_dry.CHECK + "norms", "spills": 3},
        {**row, "model": gpu_dry.CHECK + "norms"},
    ]
    facts = dict.fromkeys(("what", "triton", "torch", "seconds"), "") | {
        "kernels": rows,
        "launches": [{"launches": 5, "faults": ["lost"]}],
        "kernels_per_layer": [],
    }
    found = gpu_dry.summarised(facts)
    assert found["checks"] == {"norms": {"kernels": 2, "seconds": 0.5}}
    assert (found["launches"], found["launch_faults"]) == (5, 1)
    sm_90 = found["architectures"]["sm_90"]
    assert (sm_90["kernels"], sm_90["of_checks"], sm_90["faults"]) == (3, 2, 1)
    (spilled,) = sm_90["spills"].values()
    assert (spilled["of"], spilled["most"]) == (1, 7)
    (lowest,) = sm_90["lowest"].values()
    assert (lowest["share"], lowest["bound"], lowest["registers"]) == (0.4, "conversions", 200)
    assert not found["architectures"]["sm_80"]["lowest"]


def test_the_page_says_what_the_record_of_the_device_says() -> None:
    record = json.loads(gpu_measured.FILE.read_text())
    page = (ROOT / "docs/gpu-measured.md").read_text()
    said = page.partition(gpu_measured.BEGIN)[2].partition(gpu_measured.END)[0]
    assert said.strip() == gpu_measured.summary(record), "benchmarks/gpu_measured.py --page"
    printed = gpu_measured.tables(record)
    for name in ("llama-3.1-8b fp8", "qwen3-30b-a3b bf16"):
        assert f"| {name} | " in said
        assert f"| {name} | 256 x 1,024 |" in printed


def test_a_record_has_a_line_for_each_row() -> None:
    record = {"parts": {"a": [{"x": 1.5, "y": "{"}, {"x": 2}], "b": {"c": [], "d": None}}, "e": [1]}
    text = gpu_bench.by_rows(record)
    assert json.loads(text) == record
    assert len(text.splitlines()) == 13
