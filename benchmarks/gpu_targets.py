"""The numbers that issue 3 asks for, as they are predicted: none of them is a measurement.

Two columns. *Optimistic*: the roofline's curves (`roofline/curves.py`, fitted to what others
measured of their kernels on this device) for everything, and what we count or assume of our own
where it is better. *Expected*: where our kernel has met no device, the worse of the curve and of
what its machine code leaves (`gpu_loops`), early starts bring nothing, and what lies around a step
is counted. Each row says what binds.

    python benchmarks/gpu_targets.py [FILE]     the file of `gpu_dry.py --json`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_loops import BANDWIDTH, Loop
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
FILLED = 0.65
"""Assumed share of a resource other than memory that a loop reaches which that resource binds:
there are barriers in it, and a program's first reads are behind each other."""
PREFILL_RATE = 435e12
"""Assumed operations per second of our prefill attention: one program a multiprocessor, one wait
for each product and no specialised warps, 55 % of the 790e12 that others measured of products."""
TABLES_AROUND = COPY + 2 * NODE
"""Seconds of a step that writes into its rows' block tables: a copy and a scatter."""


@dataclass(frozen=True, slots=True)
class Coded:
    """What the loop of our decode attention over an fp8 cache leaves of an H200's bandwidth."""

    share: float
    binds: str
    """`Loop.share`, with every cycle used."""
    filled: float
    """The share where no resource but memory gives more than `FILLED` of its cycles."""


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


def coded_share(step: StepTime, coded: Coded) -> float:
    """Share of the bandwidth that is expected of our decode attention over a coded cache: what
    others measured of theirs, unless a turn of our loop takes longer elsewhere."""
    return min(attention_share(step), coded.filled)


def expected_saturation(rows: int, coded: Coded) -> tuple[float, float]:
    """→ (`saturation` with our attention and what lies around a step; the share of the bandwidth
    that attention would need for `PUBLISHED`)."""
    decoding = [1000 + place * 1000 // rows for place in range(rows)]
    step = time("fp8", "fp8", [*decoding, 500], [*([1] * rows), rows])
    (found,) = (each for each in step.operators if each.count.label == "attention")
    rest = step.seconds - step.overhead_seconds - found.seconds + around() + TABLES_AROUND
    ours = found.limit_seconds / coded_share(step, coded)
    return rows / (rest + ours), found.limit_seconds / (rows / PUBLISHED - rest)


def expected_prefill(step: StepTime) -> float:
    """Share of the bf16 rate of a whole prompt with our attention."""
    (found,) = (each for each in step.operators if each.count.label == "attention")
    ours = found.limit_seconds * DEVICES[DEVICE].rates["bfloat16"] / PREFILL_RATE
    return step.limit_seconds / (step.seconds - found.seconds + ours)


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


def coded_loop(kernels: Iterable[dict[str, Any]]) -> Coded:
    """Decode attention over an fp8 cache on sm_90, by the rows of a dry run."""
    found = [
        coded_of(Loop(**each["loop"]), each["warps"])
        for each in kernels
        if each["kernel"] == "attention_decode._split_kernel"
        and each["architecture"] == "sm_90"
        and each["model"] == "llama-3.1-8b fp8, fp8 KV"
        and each["loop"]
    ]
    assert found, "the dry run has no attention over an fp8 cache"
    return min(found, key=lambda each: each.filled)


def coded_of(loop: Loop, warps: int) -> Coded:
    memory = loop.global_bytes * warps / BANDWIDTH["sm_90"]
    longest = max(loop.cycles(warps, hoped=False).values())
    share, binds = loop.share("sm_90", warps, hoped=False)
    return Coded(share, binds, min(1.0, FILLED * memory / longest))


def targets(loop: Coded) -> list[dict[str, object]]:
    """What is asked for, predicted in two ways, and what binds. `loop`: see `coded_loop`."""
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
    saturated, needed = expected_saturation(room(), loop)
    held = f"{room()} rows, what memory holds"
    output = "output tokens per second, 8B fp8, 1,000 / 1,000"
    bound = (
        f"{loop.binds}: {loop.share:.0%} of the bandwidth with every cycle used, "
        f"{loop.filled:.0%} with {FILLED:.0%} of those of anything but memory"
    )
    rate = DEVICES[DEVICE].rates["bfloat16"]
    return [
        row(
            "decode attention, batch 32, 4k, bf16 KV: share of bandwidth",
            "85 %",
            f"{own_attention_share(batch):.0%}",
            f"{attention_share(batch):.0%}",
            "memory; optimistic: the tables' share for its bytes alone",
        ),
        row(
            "decode attention, batch 32, 4k, fp8 KV: share of bandwidth",
            "-",
            f"{attention_share(coded):.0%}",
            f"{coded_share(coded, loop):.0%}",
            bound,
        ),
        row(
            "bf16 decode step of the 8B, batch 1, over weight bytes / bandwidth",
            "1.15",
            f"{own_seconds(single, early=True, attention=True) / bare:.2f}",
            f"{own_seconds(single, early=False, attention=False) / bare:.2f}",
            f"memory and {NODE * 1e6:.0f} us between kernels; optimistic: early starts, "
            f"{TRIPS} reads behind each other for attention",
        ),
        row(
            "the same with the library's products and 0.5 ms around a step",
            "1.15",
            "-",
            f"{single.seconds / bare:.2f}",
            "tables alone",
        ),
        row(
            "prefill attention, 8k: share of the bf16 rate",
            "55 %",
            f"{attention_share(prompt):.0%}",
            f"{PREFILL_RATE / rate:.0%}",
            "waits between products; optimistic: tables of others' kernels",
        ),
        row(
            "prefill of the 8B, 8k, end to end: share of the bf16 rate",
            "70 %",
            f"{prompt.limit_seconds / prompt.seconds:.0%}",
            f"{expected_prefill(prompt):.0%}",
            "the library's products",
        ),
        row(
            "between device steps at batch 64, us",
            "60",
            f"{around() * 1e6:.0f}",
            f"{(around() + TABLES_AROUND) * 1e6:.0f}",
            "kernels and copies around a step; expected: block tables are written too",
        ),
        row(
            f"{output}; 256 rows",
            f"{PUBLISHED:,}",
            f"{saturation(256, counted=True):,.0f}",
            f"{expected_saturation(256, loop)[0]:,.0f}",
            "products at few rows, attention",
        ),
        row(
            f"{output}; {held}",
            f"{PUBLISHED:,}",
            f"{saturation(room(), counted=True):,.0f}",
            f"{saturated:,.0f}",
            f"attention over fp8 KV: {PUBLISHED:,} needs {needed:.0%} of the bandwidth of it",
        ),
    ]


def row(what: str, asked: str, optimistic: str, expected: str, binds: str) -> dict[str, object]:
    return {
        "what": what,
        "device": DEVICE,
        "asked": asked,
        "optimistic": optimistic,
        "expected": expected,
        "binds": binds,
    }


def target_table(rows: list[dict[str, object]]) -> str:
    lines = [
        "| on one H200, predicted | asked for | optimistic | expected | what binds |",
        "|---|---:|---:|---:|---|",
    ]
    lines += [
        f"| {each['what']} | {each['asked']} | {each['optimistic']} | {each['expected']} "
        f"| {each['binds']} |"
        for each in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    file = Path(
        sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results/gpu_dry.json"
    )
    print(target_table(targets(coded_loop(json.loads(file.read_text())["kernels"]))))
