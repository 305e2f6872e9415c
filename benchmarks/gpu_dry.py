"""`make gpu-dry`: everything that can be known of the GPU path without a GPU.

Compiles every kernel that a step of real models launches, ahead of time, for five architectures,
and for sm_90 those that the checks of `gpu_checks.py` launch (`gpu_absent.py`): the
model's own forward pass runs on tensors without memory while each launch is turned into a
compilation. Reads registers, spills, shared memory and instructions from the machine code, prints
them as a table, and fails where a kernel would not run or is not what it should be.

    python benchmarks/gpu_dry.py [--quick] [--json FILE] [--table FILE] [--record FILE --page FILE]

`--json` and `--table` have everything, in megabytes; `--record` and `--page` have a summary by
architecture, which the repository keeps.

The kernels' results are the business of `tests/kernels_triton` (the interpreter). Nothing here is
a measurement.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_aot import Compiled, compiling, read_all, triton_version
from gpu_bench import put_between
from gpu_models import ARCHS, Step, batch_for, decode, prefill, thin, without_memory
from gpu_nodes import node_table, nodes
from gpu_sass import SHARED_LIMIT, TENSOR_MEMORY, Code

from headrace.kernels.triton.operators import TritonOperators

ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
STEPS = (
    decode(1, 1024),
    decode(8, 1024),
    decode(32, 4096),
    decode(256, 1024),
    prefill(2048, 2048),
    Step("mixed 16 + 512", (*((1024, 1),) * 16, (512, 512))),
)
MODELS = (
    ("qwen2.5-0.5b", "bfloat16", "bfloat16", False),
    ("qwen2.5-0.5b", "q5_0", "bfloat16", False),
    ("qwen2.5-0.5b", "q6_k", "bfloat16", False),
    ("llama-3.1-8b", "bfloat16", "bfloat16", False),
    ("llama-3.1-8b", "bfloat16", "bfloat16", True),
    ("llama-3.1-8b", "fp8", "fp8", False),
    ("llama-3.1-8b", "int4", "int8", False),
    ("llama-3.1-8b", "q4_k", "bfloat16", False),
    ("qwen3-30b-a3b", "bfloat16", "bfloat16", False),
    ("qwen3-30b-a3b", "fp8", "bfloat16", False),
    ("qwen3-30b-a3b", "int4", "bfloat16", False),
    ("llama-3.1-8b", "fp8 blocks", "bfloat16", False),
    ("gemma-3-1b", "bfloat16", "bfloat16", False),
    ("gpt-oss-20b", "mxfp4", "bfloat16", False),
    ("llama-3.1-8b", "fp8", "fp8", True),
    ("qwen2.5-0.5b", "bfloat16", "int8", False),
    ("qwen2.5-0.5b", "bfloat16", "k8v4", False),
    ("llama-3.1-8b", "int4", "k8v4", False),
    ("deepseek-v2-lite", "bfloat16", "bfloat16", False),
    ("granite-4.0-h-tiny", "bfloat16", "bfloat16", False),
    ("gemma-4-26b-a4b", "bfloat16", "bfloat16", False),
)
"""(architecture, weights, KV, deterministic)."""
QUICK = (MODELS[0], MODELS[6])
CHECKED = "sm_90"
"""For whose devices the checks' kernels are compiled too."""
CHECK = "check: "
CHECKED_STEP = "check"
"""Stands for the step of a kernel that only a check launches."""
MATRIX_ROWS = 512
"""Steps of this many tokens are matrix-bound: their products and their attention must use the
warpgroup instructions on sm_90."""
MATRIX_BOUND = (
    "attention_prefill._prefill_kernel",
    "product_dense._product_kernel",
    "product_fp8._product_kernel",
    "moe_products._dense_kernel",
    "moe_products._fp8_kernel",
)
MATRIX = (
    "attention_decode._split_kernel",
    "attention_prefill._prefill_kernel",
    "product_dense._product_kernel",
    "product_fp8._product_kernel",
    "product_packed._product_kernel",
    "product_packed_skinny._product_kernel",
    "product_skinny._product_kernel",
    "moe_products._dense_kernel",
    "moe_products._fp8_kernel",
    "moe_products._packed_kernel",
    "moe_packed._few_kernel",
)
"""These multiply: without a matrix instruction the compiler has made nothing of them."""
E4M3 = ("product_fp8._product_kernel", "moe_products._fp8_kernel")
"""These multiply codes, as `product_skinny` does where it is SCALED."""
SPILLS_EXPLAINED = {
    "product_skinny._product_kernel": (
        9,
        "sm_90, 16 rows with a gate, Triton 3.7: registers stored before the loop and loaded after "
        "it, none in it",
    ),
    "attention_prefill._prefill_kernel": (
        218,
        "Triton 3.7: 6 for heads of 128, three registers before both loops and after them; up to "
        "57 on sm_80 and sm_90 for latents, heads of 512 and tiles of 64 rows on four warps; "
        "124 on sm_90 and 218 on sm_100 where int8 keys lack biases, in few layers of few models",
    ),
    "attention_decode._split_kernel": (
        6,
        "Triton 3.7, sm_100, heads of 256: two registers of 128, 6 of 1,432 instructions",
    ),
}
"""Kernel → up to how many spills, and why they do no harm."""
BEGIN, END = "<!-- gpu-dry begins -->", "<!-- gpu-dry ends -->"
WORST = 5
"""Kernels of an architecture that the summary names."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one process compiles."""

    architecture: str
    models: tuple[tuple[str, str, str, bool], ...]
    checks: bool = False
    """The kernels of the checks instead."""

    @property
    def name(self) -> str:
        return f"{self.architecture}, {'checks' if self.checks else 'models'}"


@dataclass(slots=True)
class Row:
    """One kernel, for one architecture, as its first use compiled it."""

    kernel: str
    architecture: str
    model: str
    step: str
    launches: int
    registers: int
    spills: int
    stack: int
    shared: int
    warps: int
    stages: int
    resident: int
    matrix: str
    instructions: dict[str, int]
    loop: dict[str, float] | None
    """`gpu_loops.Loop`: what a turn of the loop that multiplies asks, for one warp."""
    possible: list[tuple[float, str]]
    """`Loop.share`, hoped and not; empty where there is no such loop."""
    seconds: float
    faults: list[str]


def main() -> int:
    from gpu_driver import driven_rows, driver_table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two models")
    parser.add_argument("--architecture", choices=ARCHITECTURES, help="this one only")
    parser.add_argument("--model", type=int, help="the model of this number only")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--brief", action="store_true", help="print no tables")
    parser.add_argument("--table", type=Path, help="write the tables there")
    parser.add_argument("--record", type=Path, help="write the summary there, as JSON")
    parser.add_argument("--page", type=Path, help="put the summary between the marks of this page")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    models = QUICK if arguments.quick else MODELS
    if arguments.model is not None:
        models = MODELS[arguments.model : arguments.model + 1]
    wanted = (arguments.architecture,) if arguments.architecture else ARCHITECTURES
    parts = [Part(architecture, models) for architecture in wanted]
    if CHECKED in wanted and len(models) == len(MODELS):
        parts.append(Part(CHECKED, models, checks=True))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(parts), os.cpu_count() or 1), context) as pool:
        # Those of the checks take longest.
        running = {part: pool.submit(compile_part, part) for part in reversed(parts)}
        rows = [row for part in parts for row in running[part].result()]
    kernels = [asdict(row) for row in rows]
    # Of one model or one architecture the kernels alone are asked for.
    whole = len(models) == len(MODELS) and len(wanted) == len(ARCHITECTURES)
    assert whole or not (arguments.record or arguments.page), "a summary is of everything"
    layers = nodes() if whole else []
    driven = driven_rows() if whole else []
    text = "\n\n".join((node_table(layers), driver_table(driven), kernel_table(rows) + "\n"))
    if not arguments.brief:
        print(text)
    facts = {
        "what": "ahead-of-time compilation; nothing was measured on a GPU",
        "triton": triton_version(),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - begin, 1),
        "kernels": kernels,
        "kernels_per_layer": layers,
        "launches": driven,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    if arguments.table:
        arguments.table.write_text(text)
    if arguments.record:
        arguments.record.write_text(json.dumps(summarised(facts), indent=1) + "\n")
    if arguments.page:
        put_between(arguments.page, BEGIN, END, summary_text(summarised(facts)))
    faults = [f"{row.architecture} {row.kernel}: {fault}" for row in rows for fault in row.faults]
    faults += [
        f"{row['model']}, {row['step']}: {fault}" for row in driven for fault in row["faults"]
    ]
    odd = [row for row in rows if row.model.startswith(CHECK) and row.spills]
    for row in odd:
        print(f"for a check alone: {row.kernel} ({row.model}): {row.spills} spills")
    print(f"{len(rows)} kernels compiled in {time.perf_counter() - begin:.0f} s")
    print("\n".join(faults) if faults else "no faults")
    return 1 if faults else 0


def compile_part(part: Part) -> list[Row]:
    """In a process of its own."""
    torch.set_num_threads(1)
    if part.checks:
        rows = list(compile_checks(part.architecture))
    else:
        rows = list(compile_all(part.architecture, part.models))
    print(f"{part.name}: {len(rows)} kernels", file=sys.stderr, flush=True)
    return rows


def compile_checks(architecture: str) -> Iterator[Row]:
    """Kernels of the checks that a device will run first, each once."""
    from gpu_absent import WORKERS, compiled, names

    first: dict[bytes | Code, tuple[str, Compiled]] = {}
    for name, found in compiled(architecture, [*names(architecture), *WORKERS[:1]]):
        for each in found:
            first.setdefault(each.machine, (name, each))
    read_all(each for _, each in first.values())
    for name, each in first.values():
        yield make_row(each, CHECK + name, Step(CHECKED_STEP, ((0, 1),)))


def launched(
    architecture: str, models: tuple[tuple[str, str, str, bool], ...]
) -> Iterator[tuple[str, Step, list[Compiled]]]:
    """Every kernel of every step of these models: (the model, the step, what it launches)."""
    known: dict[int, Compiled] = {}
    for name, weights, kv, deterministic in models:
        if architecture in ("sm_80", "sm_86") and "fp8" in (weights, kv):
            continue  # This architecture has no such numbers; the backend says so.
        arch = thin(ARCHS[name])
        with torch.inference_mode():
            model, operators, cache = without_memory(
                arch, architecture, weights, kv, deterministic=deterministic
            )
            label = f"{name} {weights}, {kv} KV" + (", deterministic" if deterministic else "")
            for step in STEPS:
                batch = batch_for(step, cache, "meta")
                with compiling(architecture, known) as found:
                    model.forward(operators, batch, cache)
                    if not deterministic:
                        draw_tokens(operators, len(step.entries), arch.vocab_size)
                yield label, step, found


def compile_all(architecture: str, models: tuple[tuple[str, str, str, bool], ...]) -> Iterator[Row]:
    """What is told of each kernel, once."""
    uses = [
        (label, step, each)
        for label, step, found in launched(architecture, models)
        for each in found
    ]
    read_all(each for _, _, each in uses)
    seen: set[tuple[object, ...]] = set()
    for label, step, compiled in uses:
        cut = (compiled.warps, compiled.stages, compiled.code.registers)
        key = (compiled.kernel, *cut, compiled.shared, str(compiled.constants))
        if key not in seen:
            seen.add(key)
            yield make_row(compiled, label, step)


def draw_tokens(operators: TritonOperators, rows: int, vocabulary: int) -> None:
    """The kernels of sampling."""
    operators.warm_draws(torch.empty(rows, vocabulary, device="meta"))


def make_row(compiled: Compiled, model: str, step: Step) -> Row:
    code, loop = compiled.code, compiled.code.loop
    cut = compiled.architecture, compiled.warps
    return Row(
        compiled.kernel,
        compiled.architecture,
        model,
        step.name,
        len(compiled.grids),
        code.registers,
        code.spills,
        code.stack,
        compiled.shared,
        compiled.warps,
        compiled.stages,
        compiled.resident,
        code.tensor_core,
        code.instructions,
        loop and asdict(loop),
        [loop.share(*cut, hoped=hoped) for hoped in (True, False)] if loop else [],
        round(compiled.seconds, 2),
        list(find_faults(compiled, step)),
    )


def find_faults(compiled: Compiled, step: Step) -> Iterator[str]:
    """What must not be."""
    code = compiled.code
    if compiled.shared > SHARED_LIMIT[compiled.architecture]:
        yield f"needs {compiled.shared} bytes of shared memory: it would not start"
    elif compiled.columns > TENSOR_MEMORY:
        yield f"needs {compiled.columns} columns of tensor memory: it would not start"
    elif compiled.resident == 0:
        yield f"{compiled.code.registers} registers x {compiled.warps} warps: it would not start"
    # The checks' odd widths and caps cost registers that no model's shapes do; `main` counts them.
    explained, _ = SPILLS_EXPLAINED.get(compiled.kernel, (0, ""))
    if code.spills > explained and step.name != CHECKED_STEP:
        yield f"{compiled.code.spills} spills"
    yield from compiled.bounds
    # A row's bits: see `gpu_ptx`.
    loops = {str(sources) for sources in scored(compiled)}
    if compiled.kernel == "attention_prefill._prefill_kernel" and len(loops) > 1:
        yield f"rounds the arguments of exponentials by the loop: {compiled.exponents}"
    apart = compiled.kernel == "product_fp8._product_kernel" and not compiled.constants["BLOCKED"]
    if apart and (fused := code.instructions["fused multiply-add"]):
        yield f"{fused} fused multiply-adds: a part of a sum is not rounded as it is when stored"
    without = compiled.code.tensor_core == "none" and not compiled.wide
    if compiled.kernel in MATRIX and without:
        yield f"multiplies without matrix instructions ({compiled.code.instructions['all']} in all)"
    codes = compiled.kernel in E4M3 or (
        compiled.kernel == "product_skinny._product_kernel" and compiled.constants.get("SCALED")
    )
    # Nothing else there multiplies e4m3: both sides are widened first, at an unknown rate.
    if codes and compiled.architecture == "sm_90" and code.tensor_core != "warpgroup":
        yield f"widens codes before it multiplies them: {code.tensor_core}"
    if compiled.kernel in MATRIX_BOUND and step.tokens >= MATRIX_ROWS:
        wanted = {"sm_90": "warpgroup", "sm_100": "tensor memory"}
        # A mixture gives each expert few rows in small steps: there bandwidth binds.
        small = compiled.kernel.startswith("moe") and compiled.constants["ROWS"] < 64
        if compiled.code.tensor_core != wanted.get(compiled.architecture, "HMMA") and not small:
            yield f"matrix-bound, but its matrix instructions are: {compiled.code.tensor_core}"


def scored(compiled: Compiled) -> list[dict[str, int]]:
    """`Compiled.exponents` of scores: a soft cap takes exponentials too, of products."""
    if not compiled.constants.get("SOFTCAP"):
        return compiled.exponents
    without = (
        {k: n for k, n in each.items() if not k.startswith("mul.")} for each in compiled.exponents
    )
    return [each for each in without if each]


def kernel_table(rows: list[Row]) -> str:
    lines = [
        "| kernel | for | first used by | registers | spills | shared KiB | warps x stages "
        "| blocks/SM | matrix instructions | async copies | a turn of a warp: instructions "
        "/ conversions / shared B / global B | leaves of what should bind |",
        "|---|---|---|---:|---:|---:|---|---:|---|---:|---:|---|",
    ]
    shown: set[tuple[object, ...]] = set()
    for row in rows:
        figures = (
            row.kernel,
            row.architecture,
            row.registers,
            row.spills,
            row.shared,
            row.warps,
            row.stages,
            row.matrix,
        )
        if figures in shown or row.model.startswith(CHECK):
            continue  # Another specialisation, the same code to the eye; the JSON has both.
        shown.add(figures)
        matrix = row.matrix
        if matrix != "none":
            matrix = f"{matrix} ({row.instructions[matrix]})"
        lines.append(
            f"| `{row.kernel}` | {row.architecture} | {row.model}; {row.step} | {row.registers} "
            f"| {row.spills} | {row.shared / 1024:.1f} | {row.warps} x {row.stages} "
            f"| {row.resident} | {matrix} | {row.instructions['asynchronous copy']} "
            f"| {_turn(row)} |"
        )
    return "\n".join(lines)


def _turn(row: Row) -> str:
    """Two cells: what a turn of the loop asks, and the share that it leaves, hoped and not."""
    if row.loop is None:
        return "- | -"
    turn = row.loop
    asked = (turn["instructions"], turn["slow"] + turn["packed"])
    asked += (turn["shared_bytes"], turn["global_bytes"])
    shares = " to ".join(dict.fromkeys(f"{share:.0%}" for share, _ in reversed(row.possible)))
    return f"{' / '.join(f'{each:,}' for each in asked)} | {shares}: {row.possible[1][1]}"


def summarised(facts: dict[str, Any]) -> dict[str, Any]:
    """Reduce what `--json` writes to what the repository keeps."""
    checks: dict[str, dict[str, float]] = {}
    for row in facts["kernels"]:
        if row["model"].startswith(CHECK):
            check = checks.setdefault(
                row["model"].removeprefix(CHECK), {"kernels": 0, "seconds": 0}
            )
            check["kernels"] += 1
            check["seconds"] = round(check["seconds"] + row["seconds"], 2)
    return {
        **{key: facts[key] for key in ("what", "triton", "torch", "seconds")},
        "architectures": {
            name: _summarised([row for row in facts["kernels"] if row["architecture"] == name])
            for name in ARCHITECTURES
        },
        "launches": sum(row["launches"] for row in facts["launches"]),
        "launch_faults": sum(len(row["faults"]) for row in facts["launches"]),
        "kernels_per_layer": [
            {key: row[key] for key in ("model", "weights", "kv", "batch", "library", "ours")}
            for row in facts["kernels_per_layer"]
        ],
        "checks": checks,
    }


def _summarised(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ours = [row for row in rows if not row["model"].startswith(CHECK)]
    lowest: dict[str, dict[str, Any]] = {}
    for row in sorted(ours, key=lambda row: row["possible"][-1][0] if row["possible"] else 1.0):
        if row["possible"] and row["possible"][-1][0] < 1:
            share, bound = row["possible"][-1]
            found = {key: row[key] for key in ("model", "step", "registers")}
            lowest.setdefault(row["kernel"], {**found, "share": round(share, 3), "bound": bound})
    spills: dict[str, dict[str, Any]] = {}
    for row in ours:
        if row["spills"]:
            _, reason = SPILLS_EXPLAINED.get(row["kernel"], (0, ""))
            found = spills.setdefault(row["kernel"], {"of": 0, "most": 0, "reason": reason})
            found["of"] += 1
            found["most"] = max(found["most"], row["spills"])
    return {
        "kernels": len(ours),
        "of_checks": len(rows) - len(ours),
        "faults": sum(len(row["faults"]) for row in rows),
        "most_registers": max(row["registers"] for row in ours),
        "most_shared": max(row["shared"] for row in ours),
        "spills": spills,
        "lowest": dict(list(lowest.items())[:WORST]),
    }


def summary_text(record: dict[str, Any]) -> str:
    """Write what `summarised` kept as the tables of a page."""
    lines = [
        f"Triton {record['triton']}, torch {record['torch']}; {record['launches']:,} launches "
        f"reach the driver with {record['launch_faults']} faults.",
        "",
        "| architecture | kernels | of checks alone | faults | most registers "
        "| most shared KiB (limit) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    spills: dict[tuple[str, str], list[str]] = {}
    lowest = [
        "| lowest share of what should bind | architecture | first used by | share | bound |",
        "|---|---|---|---:|---|",
    ]
    for name, found in record["architectures"].items():
        limit = SHARED_LIMIT[name] / 1024
        lines.append(
            f"| {name} | {found['kernels']} | {found['of_checks']} | {found['faults']} "
            f"| {found['most_registers']} | {found['most_shared'] / 1024:.0f} ({limit:.0f}) |"
        )
        for kernel, row in found["spills"].items():
            counted = f"{name}: {row['most']} ({row['of']})"
            spills.setdefault((kernel, row["reason"]), []).append(counted)
        for kernel, row in found["lowest"].items():
            lowest.append(
                f"| `{kernel}` | {name} | {row['model']}; {row['step']} | {row['share']:.0%} "
                f"| {row['bound']} |"
            )
    layers = node_table(record["kernels_per_layer"])
    spilled = ["| most spills (kernels) | | reason |", "|---|---|---|"]
    for (kernel, reason), said in spills.items():
        spilled.append(f"| `{kernel}` | {', '.join(said)} | {reason} |")
    return "\n".join((*lines, "", *spilled, "", *lowest, "", layers))


if __name__ == "__main__":
    sys.exit(main())
