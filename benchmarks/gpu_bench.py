"""`make gpu-bench`: one command, one JSON: is the GPU path right, and how fast is it?

    PYTHONPATH=src python benchmarks/gpu_bench.py [--json FILE] [--minutes 8.5] [--tiny]

Needs torch, triton and (for one section) transformers; no network, no weights: models have real
configurations and random numbers. In order: the two ceilings (copy bandwidth, product rate); every
kernel against the reference, then its time and its share of the ceiling that binds; whole models
through the real worker (and, for the load at saturation, the real scheduler); transformers on the
same. What does not fit into the time or the memory is left out and named. `--tiny` runs all of it
on a CPU in Triton's interpreter, with sizes that mean nothing, to prove the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

TINY = "--tiny" in sys.argv
if TINY:  # Read by triton when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402
from gpu_dry import MODELS  # noqa: E402
from gpu_kernels import TINY as TINY_SIZES  # noqa: E402
from gpu_kernels import Ceilings, Sizes, cases, measure, measure_ceilings  # noqa: E402
from gpu_models import ARCHS, BLOCK  # noqa: E402
from gpu_worker import Filled, Setup, block_bytes, make_worker, pool_of, run_load  # noqa: E402

from headrace.base.arch import ModelArch  # noqa: E402
from headrace.base.step import StepPlan  # noqa: E402
from headrace.roofline.composition import compose  # noqa: E402
from headrace.roofline.counts import Case  # noqa: E402
from headrace.roofline.efficiency import PERFECT  # noqa: E402
from headrace.roofline.hardware import DEVICES  # noqa: E402
from headrace.roofline.step import step_time  # noqa: E402
from headrace.roofline.weights import WeightBytes  # noqa: E402
from headrace.worker import Worker  # noqa: E402

SETUPS = (
    Setup("llama-3.1-8b bf16", ARCHS["llama-3.1-8b"]),
    Setup("llama-3.1-8b fp8", ARCHS["llama-3.1-8b"], weights="fp8", kv="fp8"),
    Setup("llama-3.1-8b int4", ARCHS["llama-3.1-8b"], weights="int4"),
    Setup("qwen2.5-0.5b bf16", ARCHS["qwen2.5-0.5b"]),
    Setup("qwen3-30b-a3b bf16", ARCHS["qwen3-30b-a3b"]),
)
BATCHES, CONTEXTS, PREFILLS = (1, 8, 32, 128, 256), (1024, 8192), (512, 2048, 8192)
TINY_ARCH = replace(
    ARCHS["llama-3.1-8b"], hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=96,
    vocab_size=300,
)  # fmt: skip
TINY_SETUP = Setup(
    "tiny", TINY_ARCH, kv="float32", dtype="float32", device="cpu", rows=4, step_tokens=64,
    max_context=96,
)  # fmt: skip


class Bench:
    """The record being made, and the clock."""

    def __init__(self, minutes: float, path: Path) -> None:
        self._begin = time.perf_counter()
        self._end = self._begin + 60 * minutes
        self._path = path
        self.record: dict[str, Any] = {"left_out": [], "sections": {}}

    def left(self) -> float:
        return self._end - time.perf_counter()

    def section(self, name: str, needs: float, work: Callable[[], object]) -> object:
        """Run a part if `needs` seconds are left; its failure ends it, not the others."""
        if self.left() < needs:
            self.record["left_out"].append(f"{name}: {self.left():.0f} s left, {needs:.0f} needed")
            return None
        begin = time.perf_counter()
        print(f"== {name} ({self.left():.0f} s left)", flush=True)
        result: object = None
        try:
            result = self.record["sections"][name] = work()
        except Exception as fault:  # noqa: BLE001 - the border between sections
            message = f"{name}: {type(fault).__name__}: {fault}"[:2000]
            print(message, flush=True)
            self.record.setdefault("failures", []).append(message)
        self.record.setdefault("seconds", {})[name] = round(time.perf_counter() - begin, 1)
        self.save()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return result

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.record, indent=1, default=str) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, interpreted, meaningless")
    arguments = parser.parse_args()
    if not TINY and not torch.cuda.is_available():
        print("no GPU here; `--tiny` proves the script on a CPU", file=sys.stderr)
        return 2
    name = "gpu_bench_tiny" if TINY else "gpu_bench"
    bench = Bench(
        arguments.minutes, arguments.json or Path(__file__).parent / f"results/{name}.json"
    )
    device, dtype = ("cpu", torch.float32) if TINY else ("cuda", torch.bfloat16)
    bench.record["facts"] = facts(device)
    ceilings = bench.section("ceilings", 10, lambda: measure_ceilings(device, dtype))
    if not isinstance(ceilings, Ceilings):
        return 1
    bench.record["sections"]["ceilings"] = asdict(ceilings)
    print(f"copy {ceilings.bandwidth / 1e9:.0f} GB/s, product {ceilings.rate / 1e12:.1f} TFLOP/s")
    if not TINY:
        bench.section("compile", 60, compile_ahead)
    sizes = TINY_SIZES if TINY else Sizes()
    bench.section("kernels", 20, lambda: kernels(sizes, device, dtype, ceilings))
    for setup in (TINY_SETUP,) if TINY else SETUPS:
        bench.section(setup.name, 60 if not TINY else 1, lambda s=setup: model(s, ceilings, bench))  # type: ignore[misc]
    bench.section(
        "transformers", 45 if not TINY else 1,
        lambda: transformers_generate(TINY_SETUP if TINY else SETUPS[0]),
    )  # fmt: skip
    bench.save()
    for line in bench.record["left_out"] + bench.record.get("failures", []):
        print(f"!! {line}")
    return 1 if bench.record.get("failures") else 0


def facts(device: str) -> dict[str, object]:
    """What this was measured on."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()  # fmt: skip
    found: dict[str, object] = {
        "commit": commit, "python": sys.version.split()[0], "torch": torch.__version__,
        "triton": triton.__version__, "interpreted": TINY, "time": time.strftime("%F %T"),
    }  # fmt: skip
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {
            "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda,
            "capability": torch.cuda.get_device_capability(), "memory": total, "free": free,
        }  # fmt: skip
    return found


def compile_ahead() -> dict[str, object]:
    """Fill Triton's cache from several processes, so that the rest does not compile one by one."""
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) not in ((8, 0), (9, 0), (10, 0)):
        return {"left_out": f"no ahead-of-time target for {major}.{minor}"}
    script = Path(__file__).with_name("gpu_dry.py")
    running = [
        subprocess.Popen(
            [sys.executable, str(script), "--architecture", f"sm_{major}{minor}",
             "--model", str(number)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for number in range(len(MODELS))
    ]  # fmt: skip
    ends, deadline = [], time.perf_counter() + 90
    for process in running:
        try:
            _, errors = process.communicate(timeout=max(1, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            errors = "not done in 90 s"
        ends.append({"code": process.returncode, "last": errors.strip()[-300:]})
    return {"processes": ends}


def kernels(
    sizes: Sizes, device: str, dtype: torch.dtype, ceilings: Ceilings
) -> list[dict[str, object]]:
    """Right or wrong, time, share of the ceiling that binds."""
    rows = []
    with torch.inference_mode():
        for kernel in cases(sizes, device, dtype):
            row: dict[str, object] = {"kernel": kernel.name}
            try:
                wrong = None if kernel.check is None else kernel.check()
                seconds = measure(kernel.run, device)
            except Exception as fault:  # noqa: BLE001 - a kernel that fails is a row that says so
                row["failure"] = f"{type(fault).__name__}: {fault}"[:500]
                rows.append(row)
                print(f"{kernel.name}: {row['failure']}", flush=True)
                continue
            limits = {
                "memory": kernel.bytes / ceilings.bandwidth, "compute": kernel.flops / ceilings.rate
            }  # fmt: skip
            bound = max(limits, key=lambda name: limits[name])
            row |= {
                "error": wrong, "right": wrong is None or wrong <= 1, "us": seconds * 1e6,
                "bound": bound, "share": limits[bound] / seconds,
                "GB/s": kernel.bytes / seconds / 1e9, "TFLOP/s": kernel.flops / seconds / 1e12,
            }  # fmt: skip
            rows.append(row)
            verdict = "" if row["right"] else f"  WRONG by {wrong:.2f}"
            print(
                f"{kernel.name:48s} {seconds * 1e6:9.1f} us {limits[bound] / seconds:6.1%} of "
                f"{bound}{verdict}", flush=True,
            )  # fmt: skip
    wrong_ones = [row["kernel"] for row in rows if not row.get("right")]
    if wrong_ones:
        print(f"!! wrong: {', '.join(map(str, wrong_ones))}")
    return rows


def model(setup: Setup, ceilings: Ceilings, bench: Bench) -> dict[str, object]:
    """Load, memory, decode steps, prefill, saturation."""
    cuda = setup.device == "cuda"
    begin = time.perf_counter()
    worker = make_worker(setup)
    loaded = time.perf_counter() - begin
    blocks = 1 + setup.rows * -(-setup.max_context // BLOCK)
    if cuda:
        free, _ = torch.cuda.mem_get_info()
        # Activations of the largest step, graphs and the library's workspaces stay free.
        room = free - 8 * 2**30
        blocks = min(blocks, room // block_bytes(setup))
    begin = time.perf_counter()
    worker.allocate(pool_of(setup.arch, int(blocks)))
    worker.warm_up()
    row: dict[str, object] = {
        "weight_bytes": worker.facts.weight_bytes, "load_seconds": loaded,
        "graph_and_compile_seconds": time.perf_counter() - begin,
        "kv_tokens": (blocks - 1) * BLOCK, "memory": memory(setup, worker, int(blocks)),
        "graphs": graph_facts(worker), "decode": [], "prefill": [],
    }  # fmt: skip
    print(f"{setup.name}: {row['memory']} {row['graphs']}", flush=True)
    decodes, prefills = row["decode"], row["prefill"]
    assert isinstance(decodes, list)
    assert isinstance(prefills, list)
    contexts = CONTEXTS if cuda else (20,)
    for context in contexts:
        for batch in BATCHES if cuda else (1, 3):
            if Filled.blocks(batch, context, 64) > blocks or bench.left() < 20:
                bench.record["left_out"].append(f"{setup.name}: decode {batch} x {context}")
                continue
            decodes.append(decode_step(setup, worker, batch, context, ceilings))
            print(f"  {decodes[-1]}", flush=True)
    for count in PREFILLS if cuda else (16,):
        prefills.append(prefill_step(setup, worker, count, ceilings))
        print(f"  {prefills[-1]}", flush=True)
    if bench.left() > 45 or not cuda:
        prompt, output = (1000, 1000) if cuda else (16, 8)
        load = run_load(
            worker, setup, int(blocks), prompt=prompt, output=output,
            seconds=12 if cuda else 1, ramp_seconds=10 if cuda else 0.5,
        )  # fmt: skip
        row["saturation"] = {**asdict(load), "output_rate": load.output_rate,
                             "prompt": prompt, "output": output}  # fmt: skip
        print(f"  saturation: {row['saturation']}", flush=True)
    row["graphs"] = graph_facts(worker)
    worker.close()
    return row


def memory(setup: Setup, worker: Worker, blocks: int) -> dict[str, int]:
    """The parts that the plan counts next to what the device says."""
    parts = {"weights": worker.facts.weight_bytes, "kv": blocks * block_bytes(setup)}
    if setup.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        parts |= {
            "device_used": total - free, "torch_reserved": torch.cuda.memory_reserved(),
            "unaccounted": total - free - parts["weights"] - parts["kv"],
        }  # fmt: skip
    return parts


def graph_facts(worker: Worker) -> dict[str, object]:
    program = worker._runner._program
    found = getattr(program, "facts", None)
    return {} if found is None else asdict(found)


def decode_step(
    setup: Setup, worker: Worker, batch: int, context: int, ceilings: Ceilings
) -> dict[str, object]:
    """Wall time of steps through `execute`, time on the device, and the gap between them."""
    filled = Filled(worker, setup, batch, context, room=64)
    steps = 24 if setup.device == "cuda" else 2
    for _ in range(4 if setup.device == "cuda" else 1):
        execute(worker, filled.plan())
    begin = time.perf_counter()
    for _ in range(steps):
        execute(worker, filled.plan())
    wall = (time.perf_counter() - begin) / steps
    plan = filled.plan()
    with torch.inference_mode():
        step = worker._batch(plan)
        device = measure(lambda: worker._runner.run(step), setup.device, seconds=0.3)
    filled.release()
    limit = limit_seconds(setup, [context] * batch, [1] * batch, ceilings)
    return {
        "batch": batch, "context": context, "step_ms": wall * 1e3, "device_ms": device * 1e3,
        "gap_us": (wall - device) * 1e6, "limit_ms": limit * 1e3, "share": limit / wall,
        "device_share": limit / device, "tokens_per_second": batch / wall,
    }  # fmt: skip


def prefill_step(setup: Setup, worker: Worker, count: int, ceilings: Ceilings) -> dict[str, object]:
    filled = Filled(worker, setup, 1, count, room=1)
    admit = filled.plan()
    plan = StepPlan(1, [0], [0], [count], [True], admitted=admit.admitted, blocks=admit.blocks)
    execute(worker, plan)
    with torch.inference_mode():
        step = worker._batch(replace(plan, admitted=[], blocks=[]))
        seconds = measure(lambda: worker._runner.run(step), setup.device, seconds=0.4)
    filled.release()
    limit = limit_seconds(setup, [0], [count], ceilings)
    return {
        "tokens": count, "ms": seconds * 1e3, "tokens_per_second": count / seconds,
        "limit_ms": limit * 1e3, "share": limit / seconds,
    }  # fmt: skip


def execute(worker: Worker, plan: StepPlan) -> None:
    result = worker.execute(plan)
    assert result.error is None, result.error


def limit_seconds(setup: Setup, starts: list[int], counts: list[int], ceilings: Ceilings) -> float:
    """The roofline with the ceilings measured in this run; fp8 products at twice the rate."""
    hardware = replace(
        DEVICES["H200"],
        bandwidth=ceilings.bandwidth,
        rates={"bfloat16": ceilings.rate, "float32": ceilings.rate, "fp8": 2 * ceilings.rate},
        cache_bandwidth=max(ceilings.bandwidth, DEVICES["H200"].cache_bandwidth),
        efficiency=PERFECT,
    )
    case = Case(
        setup.arch, WeightBytes(setup.weights, head_format="bfloat16"), dtype=setup.dtype,
        kv_dtype=setup.kv,
    )  # fmt: skip
    return step_time(case, hardware, compose(setup.arch, starts, counts)).limit_seconds


def transformers_generate(setup: Setup) -> dict[str, object]:
    """The same model in transformers: generate, greedy, its own cache."""
    try:
        import transformers
    except ImportError:
        return {"absent": "transformers is not installed"}
    arch: ModelArch = setup.arch
    config = transformers.LlamaConfig(
        vocab_size=arch.vocab_size, hidden_size=arch.hidden, intermediate_size=arch.intermediate,
        num_hidden_layers=arch.layers, num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads, head_dim=arch.head_dim,
        max_position_embeddings=8192, rms_norm_eps=arch.norm_eps, eos_token_id=None,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    with torch.device(setup.device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, setup.dtype))
        try:
            model = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(default)
    rows = []
    cuda = setup.device == "cuda"
    prompt, new = (1024, 32) if cuda else (8, 4)
    for batch in (1, 32) if cuda else (2,):
        ids = torch.randint(1, arch.vocab_size, (batch, prompt), device=setup.device)
        mask = torch.ones_like(ids)
        times = {}
        for count in (1, new, 1, new):  # The second pair counts.
            begin = time.perf_counter()
            model.generate(
                ids, attention_mask=mask, min_new_tokens=count, max_new_tokens=count,
                do_sample=False,
            )  # fmt: skip
            if cuda:
                torch.cuda.synchronize()
            times[count] = time.perf_counter() - begin
        step = (times[new] - times[1]) / (new - 1)
        rows.append({"batch": batch, "context": prompt, "prefill_ms": times[1] * 1e3,
                     "step_ms": step * 1e3, "tokens_per_second": batch / step})  # fmt: skip
        print(f"  transformers {rows[-1]}", flush=True)
    return {"version": transformers.__version__, "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
