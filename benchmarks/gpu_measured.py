"""What `gpu_bench.py` measured, beside what was asked and what the roofline had said.

    python benchmarks/gpu_measured.py [FILE] [--page docs/gpu-measured.md]

FILE is the record of a bench (`results/gpu_bench.json`). *Limit* is every byte once at the
bandwidth and every operation at the rate that the same run measured; *roofline* is what
`headrace roofline` predicts for the device from curves of others' kernels, with the gap between
steps that was measured in place of its assumed overhead. `--page` puts a summary between the page's
marks; every step is printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_bench import put_between
from gpu_parts import SETUPS

from headrace.roofline.composition import compose
from headrace.roofline.hardware import DEVICES
from headrace.roofline.operators import Case
from headrace.roofline.step import step_time
from headrace.roofline.weights import WIDE_ENDS, WeightBytes

FILE = Path(__file__).parent / "results/gpu_bench.json"
BEGIN, END = "<!-- gpu-measured begins -->", "<!-- gpu-measured ends -->"
STEPS = ("1 x 1,024", "32 x 1,024", "256 x 1,024", "32 x 8,192", "prompt 512", "prompt 8,192")
"""Steps that the page shows, as `model_rows` calls them."""
PUBLISHED = 17_600
"""Output tokens per second of the 8B in FP8 at 1,000 / 1,000 on one H200, by TensorRT-LLM."""
ASKED_KERNELS = (
    ("attention decode 32 x 4096, bfloat16 KV", "85 %"),
    ("attention decode 32 x 4096, float8_e4m3fn KV", "-"),
    ("attention prefill 8192, bfloat16 KV", "55 %"),
    ("product dense, 1 rows", "-"),
    ("product fp8, 1 rows", "-"),
    ("product int4, 1 rows", "-"),
)
"""Kernels of which a share of their ceiling is told, and what was asked of them."""


def predicted(name: str, device: str, starts: list[int], counts: list[int], gap: float) -> float:
    """Seconds of a step of the setup `name` by the roofline's curves of `device`, with `gap`
    seconds around it."""
    setup = SETUPS[name]
    form = WeightBytes(setup.weights, formats=WIDE_ENDS)
    case = Case(setup.arch, form, dtype=setup.dtype, kv_dtype=setup.kv)
    step = step_time(case, DEVICES[device], compose(setup.arch, starts, counts))
    return step.seconds - step.overhead_seconds + gap


def saturated(name: str, device: str, rows: int, gap: float) -> float:
    """Output tokens per second of `rows` sequences of 1,000 + 1,000 tokens, always refilled: for
    every token that is made one of a prompt is computed, in chunks beside the decoding."""
    decoding = [1000 + place * 1000 // rows for place in range(rows)]
    return rows / predicted(name, device, [*decoding, 500], [*([1] * rows), rows], gap)


def asked_rows(record: dict[str, Any], device: str) -> Iterator[str]:
    parts = record["parts"]
    kernels = {row["kernel"]: row for row in parts["kernels"]["kernels"]}
    for name, asked in ASKED_KERNELS:
        row = kernels[name]
        yield f"| {name}: share of {row['bound']} | {asked} | {row['share']:.0%} |"
    step = cell(parts["llama-3.1-8b bf16"], 1, 1024)
    whole = step["step_ms"] / step["limit_ms"]
    yield f"| 8B bf16, one row: step over its limit | 1.15 | {whole:.2f} |"
    prompt = parts["llama-3.1-8b bf16"]["prefill"][-1]
    yield f"| 8B bf16, prompt of 8,192: share of the rate | 70 % | {prompt['share']:.0%} |"
    gap = cell(parts["llama-3.1-8b bf16"], 64, 1024)["gap_us"]
    yield f"| between device steps at 64 rows | 60 us | {gap:.0f} us |"
    load = parts["llama-3.1-8b fp8"]["saturation"]
    rows = SETUPS["llama-3.1-8b fp8"].rows
    said = saturated("llama-3.1-8b fp8", device, rows, load["gap_us"] / 1e6)
    yield (
        f"| 8B fp8, {rows} rows of 1,000 / 1,000: output tokens per second (roofline: {said:,.0f}) "
        f"| {PUBLISHED:,} | {load['output_rate']:,.0f} |"
    )


def cell(part: dict[str, Any], batch: int, context: int) -> dict[str, Any]:
    (found,) = (x for x in part["decode"] if (x["batch"], x["context"]) == (batch, context))
    return found  # type: ignore[no-any-return]


def model_rows(record: dict[str, Any], device: str) -> Iterator[str]:
    for name, part in record["parts"].items():
        if name not in SETUPS:
            continue
        for each in part.get("decode", []):
            batch, context = each["batch"], each["context"]
            said = predicted(name, device, [context] * batch, [1] * batch, each["gap_us"] / 1e6)
            yield line(name, f"{batch} x {context:,}", each["step_ms"], each["limit_ms"], said)
        for each in part.get("prefill", []):
            said = predicted(name, device, [0], [each["tokens"]], 0.0)
            yield line(name, f"prompt {each['tokens']:,}", each["ms"], each["limit_ms"], said)


def line(name: str, step: str, milliseconds: float, limit: float, said: float) -> str:
    return (
        f"| {name} | {step} | {milliseconds:.2f} | {limit:.2f} | {limit / milliseconds:.0%} "
        f"| {said * 1e3:.2f} | {said * 1e3 / milliseconds:.2f} |"
    )


def summary(record: dict[str, Any]) -> str:
    """Write what the page shows: a row for each model, with the most telling steps."""
    device = device_of(record)
    cells: dict[str, dict[str, str]] = {}
    for row in model_rows(record, device):
        _, name, step, milliseconds, _, share, _, ratio, _ = (
            each.strip() for each in row.split("|")
        )
        cells.setdefault(name, {})[step] = f"{milliseconds}, {share}, {ratio}"
    lines = [f"| model | {' | '.join(STEPS)} |", f"|---|{'---:|' * len(STEPS)}"]
    for name, found in cells.items():
        lines.append(f"| {name} | {' | '.join(found.get(step, '-') for step in STEPS)} |")
    return "\n".join((*facts_lines(record, device), *lines))


def device_of(record: dict[str, Any]) -> str:
    facts = record["parts"]["kernels"]["facts"]
    return str(facts["device"].removeprefix("NVIDIA ").split()[0])


def tables(record: dict[str, Any]) -> str:
    device = device_of(record)
    lines = [
        *facts_lines(record, device),
        "| model | step | ms | limit | share | roofline's ms | roofline over measured |",
        "|---|---|---:|---:|---:|---:|---:|",
        *model_rows(record, device),
    ]
    return "\n".join(lines)


def facts_lines(record: dict[str, Any], device: str) -> list[str]:
    ceilings = record["parts"]["kernels"]["ceilings"]
    facts = record["parts"]["kernels"]["facts"]
    right = [row["right"] for row in record["parts"]["checks"]]
    return [
        f"One {device}, torch {facts['torch']}, Triton {facts['triton']}, {record['began']}, "
        f"commit {record['commit']}: {sum(right)} of {len(right)} checks right. Ceilings of the "
        f"run: {ceilings['bandwidth'] / 1e9:,.0f} GB/s copied, "
        f"{ceilings['rate'] / 1e12:.0f} TFLOP/s of a large bf16 product.",
        "",
        "| measured | asked for | is |",
        "|---|---:|---:|",
        *asked_rows(record, device),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    parser.add_argument("--page", type=Path, help="put the tables between this page's marks")
    arguments = parser.parse_args()
    record = json.loads(arguments.file.read_text())
    print(tables(record))
    if arguments.page:
        put_between(arguments.page, BEGIN, END, summary(record))


if __name__ == "__main__":
    main()
