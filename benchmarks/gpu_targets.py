"""The numbers that issue 3 asks for, as the roofline predicts them: expectations, not measurements.

Each row says what it rests on. "Tables": the roofline's curves (`roofline/curves.py`), fitted to
measurements that others made of their kernels on this device; for the library's products that is
a statement about what runs, for our attention it says how good others' is. "Assumed": nobody has
measured it, and the row says what was put in its place.
"""

from __future__ import annotations

from gpu_models import ARCHS, ROOFLINE

from headrace.roofline.composition import compose
from headrace.roofline.hardware import DEVICES
from headrace.roofline.operators import Case
from headrace.roofline.steady import Demand, Engine
from headrace.roofline.step import StepTime, step_time
from headrace.roofline.weights import WeightBytes

DEVICE = "H200"
LLAMA = ARCHS["llama-3.1-8b"]
PUBLISHED = 17_600
"""Output tokens per second of the 8B in FP8 at 1,000 / 1,000 on one H200, by TensorRT-LLM."""
START = 3.0e-6
"""Assumed seconds of one of our products beside its bytes: the two microseconds that the roofline
assumes for any node of a graph, and one until the first weights have arrived. The library's in the
tables is 3.6 and 0.14 for 1,000 inputs."""
GAP = 60e-6
"""Assumed seconds between two steps: what is asked. The roofline's own half millisecond is for
engines whose host is not a step ahead."""
FUSED = ("norms", "gated")
"""Operators that a product of at most four rows takes in (`table.json`, `product_skinny`)."""
TABLES, ASSUMED = "tables", "assumed"


def time(weights: str, kv: str, starts: list[int], counts: list[int]) -> StepTime:
    case = Case(LLAMA, WeightBytes(ROOFLINE[weights], head_format="bfloat16"), kv_dtype=kv)
    return step_time(case, DEVICES[DEVICE], compose(LLAMA, starts, counts))


def attention_share(step: StepTime) -> float:
    (found,) = (each for each in step.operators if each.count.label == "attention")
    return found.limit_seconds / found.seconds


def saturation(rows: int) -> float:
    """Output tokens per second with `rows` sequences of 1,000 + 1,000 tokens, always refilled:
    for every token that is made one of a prompt is computed, in chunks beside the decoding."""
    decoding = [1000 + place * 1000 // rows for place in range(rows)]
    step = time("fp8", "fp8", [*decoding, 500], [*([1] * rows), rows])
    return rows / step.seconds


def room() -> int:
    """Sequences of 2,000 tokens in fp8 that the memory holds beside the weights."""
    case = Case(LLAMA, WeightBytes("fp8", head_format="bfloat16"), kv_dtype="fp8")
    return Engine(case, DEVICES[DEVICE], Demand(1.0, 1000, 1000)).room()


def fused_seconds(step: StepTime) -> float:
    """A step of at most four rows with our products: their bytes at the share of the bandwidth
    that the tables show for large products, `START` for each, nothing for what they take in."""
    hardware = DEVICES[DEVICE]
    share = hardware.efficiency.curves["product/bfloat16"].memory
    seconds = GAP
    for each in step.operators:
        if each.count.label in FUSED:
            continue
        if each.count.kind == "product":
            streamed = each.count.weight_bytes / (hardware.bandwidth * share)
            seconds += each.count.calls * (START + streamed)
        else:
            seconds += each.seconds
    return seconds


def targets() -> list[dict[str, object]]:
    """(what, asked for, predicted, what that rests on) of each."""
    single = time("bfloat16", "bfloat16", [1023], [1])
    weights = 2 * sum(
        rows * width
        for rows, width in (
            (LLAMA.vocab_size, LLAMA.hidden),
            *[
                shape
                for shape in (
                    ((LLAMA.heads + 2 * LLAMA.kv_heads) * LLAMA.head_dim, LLAMA.hidden),
                    (LLAMA.hidden, LLAMA.heads * LLAMA.head_dim),
                    (2 * LLAMA.intermediate, LLAMA.hidden),
                    (LLAMA.hidden, LLAMA.intermediate),
                )
                for _ in range(LLAMA.layers)
            ],
        )
    )
    bare = weights / DEVICES[DEVICE].bandwidth
    batch = time("bfloat16", "bfloat16", [4095] * 32, [1] * 32)
    prompt = time("bfloat16", "bfloat16", [0], [8192])
    coded = time("fp8", "fp8", [4095] * 32, [1] * 32)
    step = "bf16 decode step of the 8B, batch 1, over weight bytes / bandwidth"
    output = "output tokens per second, 8B fp8, 1,000 / 1,000"
    held = room()
    return [
        row("decode attention, batch 32, 4k, bf16 KV: share of bandwidth", "85 %",
            f"{attention_share(batch):.0%}", TABLES),
        row("decode attention, batch 32, 4k, fp8 KV: share of bandwidth", "-",
            f"{attention_share(coded):.0%}", TABLES),
        row(f"{step}; the library's products, 0.5 ms around a step", "1.15",
            f"{single.seconds / bare:.2f}", TABLES),
        row(f"{step}; our products, 60 us around a step", "1.15",
            f"{fused_seconds(single) / bare:.2f}",
            f"{ASSUMED}: {START * 1e6:.0f} us a product, the tables' share of bandwidth"),
        row("prefill attention, 8k: share of the bf16 rate", "55 %",
            f"{attention_share(prompt):.0%}", TABLES),
        row("prefill of the 8B, 8k, end to end: share of the bf16 rate", "70 %",
            f"{prompt.limit_seconds / prompt.seconds:.0%}", TABLES),
        row("between device steps at batch 64", "60 us", "-", "measured by gpu-bench alone"),
        row(f"{output}; 256 rows", f"{PUBLISHED:,}", f"{saturation(256):,.0f}", TABLES),
        row(f"{output}; {held} rows, what memory holds", f"{PUBLISHED:,}",
            f"{saturation(held):,.0f}", TABLES),
    ]  # fmt: skip


def row(what: str, asked: str, predicted: str, rests_on: str) -> dict[str, object]:
    return {
        "what": what, "device": DEVICE, "asked": asked, "predicted": predicted,
        "rests_on": rests_on,
    }  # fmt: skip


def target_table() -> str:
    lines = ["| on one H200 | asked for | predicted | rests on |", "|---|---:|---:|---|"]
    lines += [
        f"| {each['what']} | {each['asked']} | {each['predicted']} | {each['rests_on']} |"
        for each in targets()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(target_table())
