"""What padding a decode step to the next bucket costs, by the roofline: predicted, not measured.

    python benchmarks/gpu_buckets.py

Padding rows go through the products, norms and gates of a step; attention leaves them at once. Per
range of rows: the mean and the worst share of a step that is padding's, with the buckets of
`kernels.cuda_graphs` and with coarser and finer ones. The 8B on an H200, 1,500 tokens a sequence.
"""

from __future__ import annotations

from bisect import bisect_left

from gpu_models import ARCHS

from headrace.kernels.cuda_graphs import ENTRIES
from headrace.roofline.composition import compose
from headrace.roofline.hardware import DEVICES
from headrace.roofline.operators import Case
from headrace.roofline.step import StepTime, step_time
from headrace.roofline.weights import WIDE_ENDS, WeightBytes

CONTEXT = 1500
RANGES = ((1, 128), (129, 256), (257, 512), (513, 1024))
COARSE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FINE = (*ENTRIES[: ENTRIES.index(128)], *range(128, 1025, 32))


def decode(weights: str, rows: int) -> StepTime:
    arch = ARCHS["llama-3.1-8b"]
    case = Case(arch, WeightBytes(weights, formats=WIDE_ENDS), kv_dtype=weights)
    return step_time(case, DEVICES["H200"], compose(arch, [CONTEXT] * rows, [1] * rows))


def main() -> None:
    print("| weights | buckets | number | " + " | ".join(f"{a} to {b}" for a, b in RANGES) + " |")
    print("|---|---|---:|" + "---:|" * len(RANGES))
    for weights in ("bfloat16", "fp8"):
        steps = [decode(weights, rows) for rows in range(1, 1025)]
        whole = [step.seconds for step in steps]
        rest = [
            step.seconds - sum(o.seconds for o in step.operators if o.count.label == "attention")
            for step in steps
        ]
        for name, buckets in (("coarse", COARSE), ("ours", ENTRIES), ("fine", FINE)):
            cells = []
            for low, high in RANGES:
                lost = [
                    (rest[buckets[bisect_left(buckets, rows)] - 1] - rest[rows - 1])
                    / whole[rows - 1]
                    for rows in range(low, high + 1)
                ]
                cells.append(f"{sum(lost) / len(lost):.1%}, at most {max(lost):.1%}")
            print(f"| {weights} | {name} | {len(buckets)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
