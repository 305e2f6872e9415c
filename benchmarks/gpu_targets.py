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
from headrace.roofline.weights import WIDE_ENDS, WeightBytes

DEVICE = "H200"
LLAMA = ARCHS["llama-3.1-8b"]
PUBLISHED = 17_600
"""Output tokens per second of the 8B in FP8 at 1,000 / 1,000 on one H200, by TensorRT-LLM."""
NODE = 2.0e-6
"""Assumed seconds between two kernels of a graph, as the roofline's."""
START = NODE + 1.0e-6
"""Assumed seconds of one of our products beside its bytes: `NODE`, and one microsecond until the
first weights have arrived. The library's in the tables is 3.6 and 0.14 for 1,000 inputs."""
EARLY = 1.0e-6
"""Assumed in place of both where kernels start early (ADR 0142): until the wait inside has seen
the end of the kernel before, and the first activations have come from L2."""
TRIPS = 8
"""Trips to memory of a decode attention of one split or few, one after the other: where the
sequence lies, its table, the query, two tiles of KV, the parts and their counter, the join in two
turns."""
TRIP = 0.7e-6
"""Assumed seconds of each; a read of HBM on an idle H100 takes about so long, one of L2 a third."""
KERNELS_AROUND, COPY, COPIES_AROUND, GRAPH = 13, 4e-6, 2, 8e-6
"""On the device between two steps, counted in the code (ADRs 0143, 0146): five kernels that make
the batch and three that fill the graph's buffers, three that keep the results, two that write the
tokens where the next step reads them; a copy in and one out; and the start of a graph, in assumed
seconds."""
FUSED = ("norms", "gated")
"""Operators that a product of at most four rows takes in (`table.json`, `product_skinny`)."""
TABLES, ASSUMED = "tables", "assumed"


def time(weights: str, kv: str, starts: list[int], counts: list[int]) -> StepTime:
    case = Case(LLAMA, WeightBytes(ROOFLINE[weights], formats=WIDE_ENDS), kv_dtype=kv)
    return step_time(case, DEVICES[DEVICE], compose(LLAMA, starts, counts))


def attention_share(step: StepTime) -> float:
    (found,) = (each for each in step.operators if each.count.label == "attention")
    return found.limit_seconds / found.seconds


def around() -> float:
    """Seconds that a step waits for what lies around it; the sampler is an operator of its own.
    The host is a step ahead with `--depth 2` and takes none."""
    return KERNELS_AROUND * NODE + COPIES_AROUND * COPY + GRAPH


def saturation(rows: int, *, counted: bool = False) -> float:
    """Output tokens per second with `rows` sequences of 1,000 + 1,000 tokens, always refilled:
    for every token that is made one of a prompt is computed, in chunks beside the decoding.

    `counted`: what lies around a step as counted, in place of the roofline's half millisecond."""
    decoding = [1000 + place * 1000 // rows for place in range(rows)]
    step = time("fp8", "fp8", [*decoding, 500], [*([1] * rows), rows])
    return rows / (step.seconds - (step.overhead_seconds - around() if counted else 0.0))


def room() -> int:
    """Sequences of 2,000 tokens in fp8 that the memory holds beside the weights."""
    case = Case(LLAMA, WeightBytes("fp8", formats=WIDE_ENDS), kv_dtype="fp8")
    return Engine(case, DEVICES[DEVICE], Demand(1.0, 1000, 1000)).room()


def own_seconds(step: StepTime, *, early: bool, attention: bool) -> float:
    """A step of one row with our products: their bytes at the share of the bandwidth that the
    tables show for large products, a start for each, nothing for what they take in.

    `early`: kernels start early. `attention`: ours by its `TRIPS`, not the tables' of others."""
    hardware = DEVICES[DEVICE]
    share = hardware.efficiency.curves["product/bfloat16"].memory
    seconds = around()
    for each in step.operators:
        calls = each.count.calls
        if each.count.label in FUSED:
            continue
        if each.count.kind == "product":
            streamed = each.count.weight_bytes / (hardware.bandwidth * share)
            seconds += calls * ((EARLY if early else START) + streamed)
        elif each.count.label == "attention" and attention:
            seconds += calls * ((EARLY if early else NODE) + TRIPS * TRIP)
        elif each.count.kind == "attention":
            seconds += each.seconds
        else:
            seconds += each.seconds - (calls * (NODE - EARLY) if early else 0.0)
    return seconds


def own_attention_share(step: StepTime) -> float:
    """`attention_share` of our own kernel: KV at the tables' share of the bandwidth, and before
    and behind it a start and half of its trips, once for the whole grid."""
    (found,) = (each for each in step.operators if each.count.label == "attention")
    share = DEVICES[DEVICE].efficiency.curves["attention/decode"].memory
    limit = found.limit_seconds / found.count.calls
    return limit / (limit / share + EARLY + TRIPS / 2 * TRIP)


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
        row(
            "decode attention, batch 32, 4k, bf16 KV: share of bandwidth",
            "85 %",
            f"{attention_share(batch):.0%}",
            TABLES,
        ),
        row(
            "decode attention, batch 32, 4k, bf16 KV: share of bandwidth; our kernel",
            "85 %",
            f"{own_attention_share(batch):.0%}",
            f"{ASSUMED}: the tables' share for its bytes",
        ),
        row(
            "decode attention, batch 32, 4k, fp8 KV: share of bandwidth",
            "-",
            f"{attention_share(coded):.0%}",
            TABLES,
        ),
        row(
            f"{step}; the library's products, 0.5 ms around a step",
            "1.15",
            f"{single.seconds / bare:.2f}",
            TABLES,
        ),
        row(
            f"{step}; our products, {around() * 1e6:.0f} us around a step",
            "1.15",
            f"{own_seconds(single, early=False, attention=False) / bare:.2f}",
            f"{ASSUMED}: {START * 1e6:.0f} us a product, the tables' share of bandwidth",
        ),
        row(
            f"{step}; and kernels start early",
            "1.15",
            f"{own_seconds(single, early=True, attention=False) / bare:.2f}",
            f"{ASSUMED}: {EARLY * 1e6:.0f} us between kernels",
        ),
        row(
            f"{step}; and our attention",
            "1.15",
            f"{own_seconds(single, early=True, attention=True) / bare:.2f}",
            f"{ASSUMED}: {EARLY * 1e6 + TRIPS * TRIP * 1e6:.1f} us for one of 1,024 tokens",
        ),
        row(
            "prefill attention, 8k: share of the bf16 rate",
            "55 %",
            f"{attention_share(prompt):.0%}",
            TABLES,
        ),
        row(
            "prefill of the 8B, 8k, end to end: share of the bf16 rate",
            "70 %",
            f"{prompt.limit_seconds / prompt.seconds:.0%}",
            TABLES,
        ),
        row("between device steps at batch 64", "60 us", "-", "measured by gpu-bench alone"),
        row(f"{output}; 256 rows", f"{PUBLISHED:,}", f"{saturation(256):,.0f}", TABLES),
        row(
            f"{output}; {held} rows, what memory holds",
            f"{PUBLISHED:,}",
            f"{saturation(held):,.0f}",
            TABLES,
        ),
        row(
            f"{output}; {held} rows, {around() * 1e6:.0f} us around a step",
            f"{PUBLISHED:,}",
            f"{saturation(held, counted=True):,.0f}",
            f"tables; {ASSUMED}: what lies around a step",
        ),
    ]


def row(what: str, asked: str, predicted: str, rests_on: str) -> dict[str, object]:
    return {
        "what": what,
        "device": DEVICE,
        "asked": asked,
        "predicted": predicted,
        "rests_on": rests_on,
    }


def target_table() -> str:
    lines = ["| on one H200 | asked for | predicted | rests on |", "|---|---:|---:|---|"]
    lines += [
        f"| {each['what']} | {each['asked']} | {each['predicted']} | {each['rests_on']} |"
        for each in targets()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(target_table())
