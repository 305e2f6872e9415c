"""The parts of `make gpu-bench`, one a process: kernels, a model, transformers.

    python gpu_parts.py NAME --size real --out FILE --seconds 60 --ceilings FILE

What is found is written to FILE as soon as it is known, so that a part that is ended early keeps
what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if "tiny" in sys.argv:  # Read by triton when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).parents[1] / "tests/gpu"))

import torch
import triton
from gpu_kernels import (
    TINY,
    Ceilings,
    Sizes,
    cases,
    measure,
    measure_ceilings,
    measure_kernel,
    peers,
)
from gpu_models import ARCHS, BLOCK
from gpu_paths import SMALL, SMALL_MOE
from gpu_worker import Filled, Setup, block_bytes, make_worker, pool_of, run_load

from headrace.base.arch import ModelArch
from headrace.base.step import StepPlan
from headrace.kernels.program import LOGITS
from headrace.roofline.composition import compose
from headrace.roofline.hardware import DEVICES
from headrace.roofline.operators import Case
from headrace.roofline.step import step_time
from headrace.roofline.weights import WIDE_ENDS, WeightBytes
from headrace.worker import Worker

LLAMA, QWEN = ARCHS["llama-3.1-8b"], ARCHS["qwen2.5-0.5b"]
FEW: dict[str, int] = {"rows": 8, "step_tokens": 128, "max_context": 512}
FEWEST: dict[str, int] = {"rows": 4, "step_tokens": 64, "max_context": 96}
SMALLEST: dict[str, Any] = {"hidden": 64, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16}
SMALLEST |= {"intermediate": 96, "vocab_size": 300}
SETUPS = {
    setup.name: setup
    for setup in (
        Setup("llama-3.1-8b bf16", LLAMA),
        Setup("llama-3.1-8b bf16 deterministic", LLAMA, deterministic=True),
        # Rows that an H200 holds at 1,000 / 1,000; where less fits, fewer run.
        Setup("llama-3.1-8b fp8", LLAMA, weights="fp8", kv="fp8", rows=864),
        Setup("llama-3.1-8b int4", LLAMA, weights="int4"),
        Setup("qwen2.5-0.5b bf16", QWEN),
        Setup("qwen3-30b-a3b bf16", ARCHS["qwen3-30b-a3b"]),
        *(
            Setup(f"small {name}", arch, weights=weights, kv=kv, **FEW)
            for name, arch, weights, kv in (
                ("bf16", SMALL, "bfloat16", "bfloat16"),
                ("fp8", SMALL, "fp8", "fp8"),
                ("int4", SMALL, "int4", "int8"),
                ("experts fp8", SMALL_MOE, "fp8", "bfloat16"),
            )
        ),
        Setup(
            "tiny",
            replace(LLAMA, **SMALLEST),
            kv="float32",
            dtype="float32",
            device="cpu",
            **FEWEST,
        ),
    )
}
SMALL_SIZES = replace(
    Sizes(),
    hidden=1024,
    inner=2048,
    heads=8,
    kv_heads=2,
    vocabulary=5000,
    experts=8,
    active=2,
    expert_hidden=512,
    expert_inner=256,
    rows=(1, 64, 600),
    decodes=((3, 700),),
    prefills=((300, 50),),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of a model, by size."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prefills: tuple[int, ...]
    steps: int
    load: tuple[int, int]
    """Prompt and output of the load at saturation."""
    seconds: float
    """Duration of the load; as many seconds go before it to get going."""


PLANS = {
    "real": Plan((1, 8, 32, 128, 256, 64), (1024, 8192), (512, 2048, 8192), 24, (1000, 1000), 10),
    "small": Plan((1, 3), (100,), (60,), 3, (40, 10), 1.5),
    "tiny": Plan((1, 3), (20,), (16,), 2, (16, 8), 0.7),
}


class Record:
    """A dictionary that is in its file after every change."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        self._end = time.perf_counter() + seconds
        self.values: dict[str, Any] = {"left_out": []}

    def left(self) -> float:
        return self._end - time.perf_counter()

    def put(self, **values: object) -> None:
        self.values.update(values)
        self._path.write_text(json.dumps(self.values, default=str))

    def append(self, key: str, row: object) -> None:
        self.put(**{key: [*self.values.get(key, []), row]})


def facts(device: str) -> dict[str, object]:
    """What this was measured on."""
    found: dict[str, object] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "capability": torch.cuda.get_device_capability(),
            "memory": total,
            "free": free,
        }
    return found


def kernels(
    record: Record, size: str, device: str, dtype: torch.dtype, path: Path, made: Any = cases
) -> int:
    """The ceilings; then each kernel: right or wrong, time, share of the ceiling that binds it."""
    ceilings = measure_ceilings(device, dtype)
    path.write_text(json.dumps(asdict(ceilings)))
    record.put(facts=facts(device), ceilings=asdict(ceilings))
    print(f"copy {ceilings.bandwidth / 1e9:.0f} GB/s, product {ceilings.rate / 1e12:.1f} TFLOP/s")
    sizes = {"real": Sizes(), "small": SMALL_SIZES, "tiny": TINY}[size]
    for kernel in made(sizes, device, dtype):
        if record.left() < 5:
            record.append("left_out", f"kernels from {kernel.name} on")
            break
        row: dict[str, object] = {"kernel": kernel.name}
        try:
            wrong = None if kernel.check is None else kernel.check()
            seconds, note = measure_kernel(kernel, device)
        except Exception as fault:  # noqa: BLE001 - a kernel that fails is a row that says so
            row |= {"right": False, "failure": f"{type(fault).__name__}: {fault}"[:500]}
            record.append("kernels", row)
            print(f"{kernel.name}: {row['failure']}", flush=True)
            if "CUDA error" in str(fault):
                return 3  # The context is lost with it.
            continue
        limits = ceilings.limits(kernel)
        bound = max(limits, key=lambda name: limits[name])
        row |= {
            "error": wrong,
            "right": wrong is None or wrong <= 1,
            "us": seconds * 1e6,
            "bound": bound,
            "share": limits[bound] / seconds,
            "GB/s": kernel.bytes / seconds / 1e9,
            "TFLOP/s": kernel.flops / seconds / 1e12,
        }
        if note is not None:
            row["note"] = note
        record.append("kernels", row)
        verdict = "" if row["right"] else f"  WRONG by {wrong:.2f}"
        print(
            f"{kernel.name:48s} {seconds * 1e6:9.1f} us {limits[bound] / seconds:6.1%} of "
            f"{bound}{verdict}",
            flush=True,
        )
    return 0


def model(record: Record, setup: Setup, plan: Plan, ceilings: Ceilings) -> int:
    """Load, memory, decode steps, prefill, saturation."""
    cuda = setup.device == "cuda"
    begin = time.perf_counter()
    worker = make_worker(setup)
    loaded = time.perf_counter() - begin
    blocks = 1 + setup.rows * -(-setup.max_context // BLOCK)
    if cuda:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        # Activations of the largest step, graphs and the library's workspaces stay free.
        room = free - (8 * 2**30 if free > 16 * 2**30 else free // 2)
        blocks = min(blocks, room // block_bytes(setup))
    record.put(
        weight_bytes=worker.facts.weight_bytes, load_seconds=loaded, kv_tokens=(blocks - 1) * BLOCK
    )
    begin = time.perf_counter()
    worker.allocate(pool_of(worker, int(blocks)))
    worker.warm_up()
    record.put(
        facts=facts(setup.device),
        graph_and_compile_seconds=time.perf_counter() - begin,
        memory=memory(setup, worker, int(blocks)),
        graphs=graph_facts(worker),
        kernels_chosen=sorted({d.value for d in worker.facts.kernels if "kernels." in d.name}),
    )
    print(f"{setup.name}: {record.values['memory']} {record.values['graphs']}", flush=True)
    load_seconds = plan.seconds + ramp_seconds(setup, plan) + 4
    for context in plan.contexts:
        for batch in plan.batches:
            fits = Filled.blocks(batch, context, 64) <= blocks and batch <= setup.rows
            if not fits or record.left() < load_seconds + 8:
                why = "time" if fits else "memory"
                record.append("left_out", f"{setup.name}: decode {batch} x {context} ({why})")
                continue
            record.append("decode", decode_step(setup, worker, batch, context, ceilings, plan))
            print(f"  {say(record.values['decode'][-1])}", flush=True)
    for count in plan.prefills:
        if record.left() < load_seconds + 4:
            record.append("left_out", f"{setup.name}: prefill {count} (time)")
            continue
        record.append("prefill", prefill_step(setup, worker, count, ceilings))
        print(f"  {say(record.values['prefill'][-1])}", flush=True)
    if record.left() < load_seconds:
        record.append("left_out", f"{setup.name}: load at saturation (time)")
    else:
        prompt, output = plan.load
        load = run_load(
            worker,
            setup,
            int(blocks),
            prompt=prompt,
            output=output,
            seconds=plan.seconds,
            ramp_seconds=ramp_seconds(setup, plan),
        )
        row = {
            **asdict(load),
            "output_rate": load.output_rate,
            "gap_us": load.gap_us,
            "prompt": prompt,
            "output": output,
        }
        del row["gaps"]
        record.put(saturation=row)
        print(f"  saturation: {say(row)}", flush=True)
    record.put(graphs=graph_facts(worker))
    return 0


def ramp_seconds(setup: Setup, plan: Plan) -> float:
    """Before the load counts, every row's first prompt has to be computed."""
    return plan.seconds * max(1.0, setup.rows / 432)


def say(row: dict[str, object]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
    )


def memory(setup: Setup, worker: Worker, blocks: int) -> dict[str, int]:
    """The parts that the plan counts next to what the device says."""
    parts = {"weights": worker.facts.weight_bytes, "kv": blocks * block_bytes(setup)}
    if setup.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        parts |= {
            "device_used": total - free,
            "torch_reserved": torch.cuda.memory_reserved(),
            "unaccounted": total - free - parts["weights"] - parts["kv"],
        }
    return parts


def graph_facts(worker: Worker) -> dict[str, object]:
    program = worker.text.program
    found = getattr(program, "facts", None)
    return {} if found is None else asdict(found)


def decode_step(
    setup: Setup, worker: Worker, batch: int, context: int, ceilings: Ceilings, plan: Plan
) -> dict[str, object]:
    """Time of a step with one and with two in flight, time on the device, the gap between."""
    filled = Filled(worker, setup, batch, context, room=64)
    for _ in range(3):
        execute(worker, filled.plan())
    begin = time.perf_counter()
    for _ in range(plan.steps):
        execute(worker, filled.plan())
    alone = (time.perf_counter() - begin) / plan.steps
    gaps: list[float] = []
    before = worker.launch(filled.plan())
    begin = time.perf_counter()
    for _ in range(plan.steps):
        after = worker.launch(filled.plan())
        result = before()
        assert result.error is None, result.error
        gaps.append(result.gap)
        before = after
    wall = (time.perf_counter() - begin) / plan.steps
    before()
    step_plan = filled.plan()
    with torch.inference_mode():
        step = worker._batch(step_plan, None)
        device = measure(lambda: worker.text.program.step(step, LOGITS), setup.device, seconds=0.2)
    filled.release()
    limit = limit_seconds(setup, [context] * batch, [1] * batch, ceilings)
    return {
        "batch": batch,
        "context": context,
        "step_ms": wall * 1e3,
        "alone_ms": alone * 1e3,
        "device_ms": device * 1e3,
        "gap_us": 1e6 * sorted(gaps)[len(gaps) // 2],
        "limit_ms": limit * 1e3,
        "share": limit / wall,
        "device_share": limit / device,
        "tokens_per_second": batch / wall,
    }


def prefill_step(setup: Setup, worker: Worker, count: int, ceilings: Ceilings) -> dict[str, object]:
    filled = Filled(worker, setup, 1, count, room=1)
    admit = filled.plan()
    plan = StepPlan(1, [0], [0], [count], [True], admitted=admit.admitted, blocks=admit.blocks)
    execute(worker, plan)
    with torch.inference_mode():
        step = worker._batch(replace(plan, admitted=[], blocks=[]), None)
        seconds = measure(lambda: worker.text.program.step(step, LOGITS), setup.device, seconds=0.4)
    filled.release()
    limit = limit_seconds(setup, [0], [count], ceilings)
    return {
        "tokens": count,
        "ms": seconds * 1e3,
        "tokens_per_second": count / seconds,
        "limit_ms": limit * 1e3,
        "share": limit / seconds,
    }


def execute(worker: Worker, plan: StepPlan) -> None:
    result = worker.execute(plan)
    assert result.error is None, result.error


def limit_seconds(setup: Setup, starts: list[int], counts: list[int], ceilings: Ceilings) -> float:
    """The roofline with the ceilings measured in this run, fp8 products at twice the rate;
    caches of an H200, which an H100 has, too."""
    hardware = replace(
        DEVICES["H200"],
        bandwidth=ceilings.bandwidth,
        rates={"bfloat16": ceilings.rate, "float32": ceilings.rate, "fp8": 2 * ceilings.rate},
        cache_bandwidth=max(ceilings.bandwidth, DEVICES["H200"].cache_bandwidth),
    )
    case = Case(
        setup.arch,
        WeightBytes(setup.weights, formats=WIDE_ENDS),
        dtype=setup.dtype,
        kv_dtype=setup.kv,
    )
    return step_time(case, hardware, compose(setup.arch, starts, counts)).limit_seconds


def transformers_generate(record: Record, setup: Setup, size: str) -> int:
    """The same model in transformers: generate, greedy, its own cache."""
    try:
        import transformers
    except ImportError:
        record.put(absent="transformers is not installed")
        return 0
    arch: ModelArch = setup.arch
    config = transformers.LlamaConfig(
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden,
        intermediate_size=arch.intermediate,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        head_dim=arch.head_dim,
        max_position_embeddings=2048,
        rms_norm_eps=arch.norm_eps,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.device(setup.device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, setup.dtype))
        try:
            model = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(default)
    record.put(version=transformers.__version__)
    cuda = setup.device == "cuda"
    prompt, new = (1024, 32) if size == "real" else (8, 4)
    for batch in (1, 32) if size == "real" else (2,):
        if record.left() < 10 and size == "real":
            record.append("left_out", f"transformers: batch {batch}")
            continue
        ids = torch.randint(1, arch.vocab_size, (batch, prompt), device=setup.device)
        mask = torch.ones_like(ids)
        times = {}
        for count in (1, new, 1, new):  # The second pair counts.
            if cuda:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            model.generate(
                ids,
                attention_mask=mask,
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
            )
            if cuda:
                torch.cuda.synchronize()
            times[count] = time.perf_counter() - begin
        step = (times[new] - times[1]) / (new - 1)
        record.append(
            "rows",
            {
                "batch": batch,
                "context": prompt,
                "prefill_ms": times[1] * 1e3,
                "step_ms": step * 1e3,
                "tokens_per_second": batch / step,
            },
        )
        print(f"  transformers {say(record.values['rows'][-1])}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["kernels", "peers", "transformers", *SETUPS])
    parser.add_argument("--size", choices=list(PLANS), default="real")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--ceilings", type=Path, required=True, help="written by the part kernels")
    arguments = parser.parse_args()
    size = arguments.size
    record = Record(arguments.out, arguments.seconds)
    device, dtype = ("cpu", torch.float32) if size == "tiny" else ("cuda", torch.bfloat16)
    with torch.inference_mode():
        if arguments.name in ("kernels", "peers"):
            made = cases if arguments.name == "kernels" else peers
            return kernels(record, size, device, dtype, arguments.ceilings, made)
        if arguments.name == "transformers":
            name = {"real": "llama-3.1-8b bf16", "small": "small bf16", "tiny": "tiny"}[size]
            return transformers_generate(record, SETUPS[name], size)
        if size == "real" and arguments.ceilings.exists():
            ceilings = Ceilings(**json.loads(arguments.ceilings.read_text()))
        else:
            ceilings = measure_ceilings(device, dtype)
        return model(record, SETUPS[arguments.name], PLANS[size], ceilings)


if __name__ == "__main__":
    sys.exit(main())
