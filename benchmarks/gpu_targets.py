"""The numbers that issue 3 asks for, as the roofline predicts them: expectations, not measurements.

The roofline's efficiencies are assumptions about kernels of this kind (`roofline/hardware.py`), so
a share here says what the plan expects, and by how much the device may disappoint it.
"""

from __future__ import annotations

from gpu_models import ARCHS, ROOFLINE

from headrace.roofline.composition import compose
from headrace.roofline.hardware import DEVICES
from headrace.roofline.operators import Case
from headrace.roofline.step import StepTime, step_time
from headrace.roofline.weights import WeightBytes

DEVICE = "H200"
LLAMA = ARCHS["llama-3.1-8b"]
PUBLISHED = 17_600
"""Output tokens per second of the 8B in FP8 at 1,000 / 1,000 on one H200, by TensorRT-LLM."""
ROWS = 256


def time(weights: str, kv: str, starts: list[int], counts: list[int]) -> StepTime:
    case = Case(LLAMA, WeightBytes(ROOFLINE[weights], head_format="bfloat16"), kv_dtype=kv)
    return step_time(case, DEVICES[DEVICE], compose(LLAMA, starts, counts))


def attention_share(step: StepTime) -> float:
    (found,) = (each for each in step.operators if each.count.label == "attention")
    return found.limit_seconds / found.seconds


def saturation() -> float:
    """Output tokens per second with `ROWS` sequences of 1,000 + 1,000 tokens, always refilled:
    for every token that is made one of a prompt is computed, in chunks beside the decoding."""
    decoding = [1000 + place * 1000 // ROWS for place in range(ROWS)]
    step = time("fp8", "fp8", [*decoding, 500], [*([1] * ROWS), ROWS])
    return ROWS / step.seconds


def targets() -> list[dict[str, object]]:
    """(what, asked for, predicted) of each."""
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
    return [
        row("decode attention, batch 32, 4k, bf16 KV: share of bandwidth", "85 %",
            f"{attention_share(batch):.0%}"),
        row("decode attention, batch 32, 4k, fp8 KV: share of bandwidth", "-",
            f"{attention_share(coded):.0%}"),
        row("bf16 decode step of the 8B, batch 1, over weight bytes / bandwidth", "1.15",
            f"{single.seconds / bare:.2f}"),
        row("prefill attention, 8k: share of the bf16 rate", "55 %",
            f"{attention_share(prompt):.0%}"),
        row("prefill of the 8B, 8k, end to end: share of the bf16 rate", "70 %",
            f"{prompt.limit_seconds / prompt.seconds:.0%}"),
        row("between device steps at batch 64", "60 us", "not predicted: measured by gpu-bench"),
        row("output tokens per second, 8B fp8, 1,000 / 1,000", f"{PUBLISHED:,}",
            f"{saturation():,.0f}"),
    ]  # fmt: skip


def row(what: str, asked: str, predicted: str) -> dict[str, object]:
    return {"what": what, "device": DEVICE, "asked": asked, "predicted": predicted}


def target_table() -> str:
    lines = ["| on one H200 | asked for | predicted |", "|---|---:|---:|"]
    lines += [f"| {each['what']} | {each['asked']} | {each['predicted']} |" for each in targets()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(target_table())
