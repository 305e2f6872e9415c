"""Experts of few rows: the kernels and the instructions of a mixture's decode step, counted.

    python benchmarks/gpu_experts.py

Per layer of Qwen3-30B-A3B: kernels between the router's logits and the sum of the experts (from
`tests/kernels_triton/test_moe.py` and the code), at an assumed time each; and the time of the
experts' weights, at the tables' share of the bandwidth or at what the instructions leave of it,
counted by `gpu_packed.py`. Routing is taken as at random. Counted and predicted, not measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from gpu_models import ARCHS
from gpu_packed import CLOCK

from headrace.roofline.hardware import DEVICES

ARCH = ARCHS["qwen3-30b-a3b"]
RESULTS = Path(__file__).parent / "results/gpu_packed.json"
FORMAT = "int4, groups of 128, one zero"
BYTES = {"bfloat16": 2.0, "fp8": 1.0}
NODE = 2.0e-6
"""Assumed seconds between two kernels of a graph, as the roofline's."""
KERNELS = {
    # route, two fills, count, place, two products, the gate, gather; quantising with fp8.
    "before": {"bfloat16": (9, 9), "fp8": (10, 10), "int4": (9, 9)},
    "now": {"bfloat16": (4, 6), "fp8": (6, 8), "int4": (4, 6)},
}
"""Launches of a layer: up to four tokens, and more."""


def main() -> None:
    counted = next(
        row for row in json.loads(RESULTS.read_text())["formats"] if row["format"] == FORMAT
    )
    moe = ARCH.moe
    assert moe is not None
    each = 3 * ARCH.hidden * moe.intermediate
    print("| experts | tokens | before: kernels, ms H100, H200 | now: kernels, ms H100, H200 |")
    print("|---|---:|---:|---:|")
    for weights in ("bfloat16", "fp8", "int4"):
        for tokens in (1, 4, 8, 32, 128):
            read = each * moe.experts * (1 - (1 - moe.active / moe.experts) ** tokens)
            many = tokens * moe.active > 5 * moe.experts
            cells = []
            for way in ("before", "now"):
                kernels = KERNELS[way][weights][tokens > 4]
                times = []
                for device in CLOCK:
                    hardware = DEVICES[device]
                    share = hardware.efficiency.curves["product/bfloat16"].memory
                    size = BYTES.get(weights, counted["bytes"])
                    if weights == "int4":
                        key = "before" if way == "before" else "skinny_many" if many else "skinny"
                        share = min(share, counted["room"][device] / counted[key])
                    nodes = kernels * NODE
                    seconds = nodes + read * size / (hardware.bandwidth * share)
                    times.append(f"{1e3 * ARCH.layers * seconds:.2f}")
                cells.append(f"{kernels}, {', '.join(times)}")
            print(f"| {weights} | {tokens} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
