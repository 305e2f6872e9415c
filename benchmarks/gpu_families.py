"""Kernels and steps of families beyond the decoder that the other parts measure, on real sizes.

    python benchmarks/gpu_families.py --out FILE [--seconds 200]

First the ceilings, then each kernel and its share of the ceiling that binds it, then steps of
models of real sizes with few layers, as graphs (prompts that fit none call by call), beside the
roofline's limit with the ceilings of this run. What is found is in FILE as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from gpu_kernels import Ceilings, Kernel, measure, measure_ceilings, measure_kernel
from gpu_models import (
    BLOCK,
    ROOFLINE,
    Step,
    batch_for,
    build,
    decode,
    family_cache,
    make_batch,
    of_layers,
    prefill,
)

from headrace.base.graph import AttentionSpec, LatentSpec, RouteSpec
from headrace.base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from headrace.base.step import MOST_DRAFTS
from headrace.kernels.cuda_graphs import CudaGraphMaker, GraphProgram
from headrace.kernels.operators import KvLayer, StateLayer, StepLimits
from headrace.kernels.program import LOGITS, CallByCall
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.weights import DenseWeight
from headrace.roofline.composition import compose
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.step import step_time
from headrace.roofline.weights import parse_format

MODELS = (
    ("deepseek-v2-lite", 5, "bfloat16"),
    ("qwen3-next-80b-a3b", 4, "bfloat16"),
    ("gpt-oss-20b", 4, "mxfp4"),
    ("granite-4.0-h-tiny", 6, "bfloat16"),
    ("qwen3.5-35b-a3b", 4, "bfloat16"),
)
"""(name, layers that are kept, weights)."""
STEPS = (
    decode(1, 1024),
    decode(32, 1024),
    decode(128, 1024),
    decode(1, 8192),
    decode(32, 8000),
    prefill(512),
    prefill(2048),
)
DTYPE, DEVICE = torch.bfloat16, "cuda"


def kernels() -> Iterator[Callable[[], Kernel]]:
    for heads, step in (
        (16, decode(1, 8192)),
        (16, decode(32, 4096)),
        (16, decode(128, 1024)),
        (128, decode(32, 4096)),
        (16, prefill(2048)),
        (128, prefill(2048)),
    ):
        yield lambda heads=heads, step=step: latents(heads, step)
    for heads in (16, 128):
        for rows in (1, 32, 2048):
            yield lambda heads=heads, rows=rows: packed(heads, rows)
    delta, ssm = DeltaSpec(0, 16, 32, 128, 128, 1e-6), SsmSpec(0, 1, 48, 128, 64, 1e-5)
    for name, spec in (("delta rule", delta), ("state space", ssm)):
        for step in (decode(1, 1024), decode(32, 1024), decode(128, 1024), prefill(2048)):
            yield lambda name=name, spec=spec, step=step: walk(name, spec, step)
    for step in (decode(32, 1024), prefill(2048)):
        yield lambda step=step: convolution(step)
    for rows in (32, 2048):
        yield lambda rows=rows: routed(rows)


def latents(heads: int, step: Step) -> Kernel:
    batch = make_batch(step, [None], DEVICE)
    blocks = int(batch.groups[0].tables.max()) + 1
    k = torch.randn(blocks, 1, BLOCK, 576, device=DEVICE).to(DTYPE)
    spec = AttentionSpec(0, heads, 1, 576, 0.07, latent=True, rotated=64)
    q = torch.randn(step.tokens, spec.queries, device=DEVICE).to(DTYPE)
    ops, kv = TritonOperators(DTYPE), KvLayer(k, k)
    pairs = sum(sum(range(start + 1, start + count + 1)) for start, count in step.entries)
    read = sum(start + count for start, count in step.entries) * 1152
    moved = read + step.tokens * heads * (576 + 512) * 2
    return Kernel(
        f"latents, {heads} heads, {step.name}",
        lambda: ops.attend(q, spec, kv, batch, 0),
        moved,
        2.0 * pairs * heads * (576 + 512),
    )


def packed(heads: int, rows: int) -> Kernel:
    spec = LatentSpec(0, heads, 512, 64, 128, 128, 1.0)
    matrices = torch.randn(heads, 512, 128, device=DEVICE).to(DTYPE)
    weights = [DenseWeight(matrix) for matrix in matrices]
    q, latent, rotary = (
        torch.randn(rows, size, device=DEVICE).to(DTYPE) for size in (spec.queries, 512, 64)
    )
    ops = TritonOperators(DTYPE)
    moved = 2 * (matrices.numel() + rows * (spec.queries + (heads + 1) * 576 + 576))
    return Kernel(
        f"queries to latents, {heads} heads, {rows} rows",
        lambda: ops.absorb(q, latent, rotary, spec, weights),
        moved,
        2.0 * rows * matrices.numel(),
    )


def walk(name: str, spec: DeltaSpec | SsmSpec, step: Step) -> Kernel:
    batch = make_batch(step, [], DEVICE, states=True)
    rows, heads = len(step.entries), spec.value_heads
    sizes = spec.key_size, spec.value_size
    layer = StateLayer(
        torch.zeros(1, 1, 1, device=DEVICE),
        torch.randn(rows + 1, heads, *sizes, device=DEVICE),
        torch.zeros(rows + 1, MOST_DRAFTS, heads, sum(sizes) + 2, device=DEVICE),
    )
    widths = [spec.mixed, spec.values, *[heads] * spec.gates]
    given = [torch.randn(step.tokens, width, device=DEVICE).to(DTYPE) for width in widths]
    vectors = [heads, heads, sizes[1]] if isinstance(spec, DeltaSpec) else [heads] * 3
    vectors += [] if isinstance(spec, DeltaSpec) else [spec.values]
    weights = [torch.rand(size, device=DEVICE).to(DTYPE) for size in vectors]
    ops, numbers = TritonOperators(DTYPE), heads * sizes[0] * sizes[1]
    moved = rows * numbers * 8 + 2 * step.tokens * (sum(widths) + spec.values)
    return Kernel(
        f"{name}, {step.name}",
        lambda: ops.recur(given, spec, weights, layer, batch, 0),
        moved,
        7.0 * step.tokens * numbers,
    )


def convolution(step: Step) -> Kernel:
    batch, channels = make_batch(step, [], DEVICE, states=True), 8192
    layer = StateLayer(torch.zeros(len(step.entries) + 1, 10, channels, device=DEVICE))
    x = torch.randn(step.tokens, channels, device=DEVICE).to(DTYPE)
    taps, ops = torch.randn(4 * channels, device=DEVICE).to(DTYPE), TritonOperators(DTYPE)
    kept = len(step.entries) * channels * 4 * 4
    return Kernel(
        f"short convolution, {step.name}",
        lambda: ops.short_conv(x, ConvSpec(0, 4, "silu"), taps, None, layer, batch, 0),
        kept + 4 * step.tokens * channels,
        8.0 * step.tokens * channels,
    )


def routed(rows: int) -> Kernel:
    logits = torch.randn(rows, 256, device=DEVICE)
    bias, ops = torch.randn(256, device=DEVICE), TritonOperators(DTYPE)
    spec = RouteSpec(8, True, "sigmoid", 2.5, 8, 4)
    return Kernel(
        f"routes of DeepSeek-V3, {rows} rows",
        lambda: ops.route(logits, spec, bias),
        rows * (256 * 4 + 8 * 8),
        0.0,
    )


def steps(name: str, layers: int, weights: str, ceilings: Ceilings) -> Iterator[dict[str, object]]:
    """Milliseconds of each step beside its limit."""
    arch = of_layers(known(name)[0], range(layers))
    ops = TritonOperators(DTYPE)
    model = build(arch, ops, device=DEVICE, weights=weights, max_context=8320)
    cache = family_cache(arch, 1 + 32 * 521, DEVICE, rows=128)
    for layer, _ in cache.kept():
        if isinstance(layer, KvLayer):
            for pages in (layer.k, layer.v):
                pages.normal_()  # Zeros are read faster.
    plain = CallByCall(model, ops, cache, ops.drawing)
    limits = StepLimits(tokens=512, entries=128, max_context=8320)
    program = GraphProgram(plain, limits, CudaGraphMaker(torch.device(DEVICE)))
    program.capture()
    hardware = replace(
        DEVICES["H100"],
        bandwidth=ceilings.bandwidth,
        rates={"bfloat16": ceilings.rate, "float32": ceilings.rate, "fp8": 2 * ceilings.rate},
        cache_bandwidth=max(ceilings.bandwidth, DEVICES["H100"].cache_bandwidth),
    )
    for step in STEPS:
        batch = batch_for(step, cache, DEVICE)
        # Rows of one token would choose the same experts.
        batch.tokens.random_(0, arch.vocab_size)
        before = program.facts.replayed
        seconds = measure(lambda batch=batch: program.step(batch, LOGITS), DEVICE)
        starts, counts = map(list, zip(*step.entries, strict=True))
        case = Case(arch, parse_format(ROOFLINE[weights]))
        found = step_time(case, hardware, compose(arch, starts, counts))
        yield {
            "model": name,
            "layers": layers,
            "weights": weights,
            "step": step.name,
            "graph": program.facts.replayed > before,
            "ms": seconds * 1e3,
            "limit_ms": found.limit_seconds * 1e3,
            "share": found.limit_seconds / seconds,
            "bound": found.bound,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    arguments = parser.parse_args()
    end = time.perf_counter() + arguments.seconds
    record: dict[str, list[object]] = {"kernels": [], "steps": [], "failures": []}

    def keep() -> None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")

    with torch.inference_mode():
        ceilings = measure_ceilings(DEVICE, DTYPE)
        record["facts"] = [torch.cuda.get_device_name(), torch.__version__, asdict(ceilings)]
        print(record["facts"], flush=True)
        for make in kernels():
            try:
                kernel = make()
                seconds, note = measure_kernel(kernel, DEVICE)
            except Exception as fault:  # noqa: BLE001 - one that fails is a row that says so
                record["failures"].append(f"{type(fault).__name__}: {fault}"[:600])
                print(record["failures"][-1], flush=True)
                continue
            bound = ceilings.limits(kernel)
            name = max(bound, key=lambda each: bound[each])
            row = {"kernel": kernel.name, "us": seconds * 1e6, "bound": name}
            row |= {"share": bound[name] / seconds, "note": note}
            record["kernels"].append(row)
            keep()
            print(f"{kernel.name:44s} {seconds * 1e6:9.1f} us {row['share']:6.1%} of {name}")
        for name, layers, weights in MODELS:
            if time.perf_counter() > end:
                record["failures"].append(f"{name}: no time left")
                break
            try:
                for step in steps(name, layers, weights, ceilings):
                    record["steps"].append(step)
                    keep()
                    print({key: step[key] for key in ("model", "step", "ms", "share")}, flush=True)
            except Exception as fault:  # noqa: BLE001 - a model that fails is a row that says so
                record["failures"].append(f"{name}: {type(fault).__name__}: {fault}"[:900])
                print(record["failures"][-1], flush=True)
            torch.cuda.empty_cache()
    keep()
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
