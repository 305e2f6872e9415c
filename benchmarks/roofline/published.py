"""Simulated throughput next to what others published, as it is: `python -m benchmarks…` prints it.

Rows: TensorRT-LLM's performance overview (output tokens/s on one GPU at full load), Llama 3.1 8B
and 70B in FP8 with an FP8 cache. Nothing here was fitted to these rows: efficiencies are the
assumed defaults of `roofline.hardware`.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

from headrace.bench.options import RunOptions
from headrace.bench.virtual import Simulation
from headrace.engine.sim import Cluster, ReplicaSpec
from headrace.roofline.counts import Case, Layout
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import KNOWN
from headrace.roofline.weights import WeightBytes

ROWS = [
    ("llama-3.1-8b", "H200", 1, 128, 128, 28_447),
    ("llama-3.1-8b", "H200", 1, 128, 2048, 23_295),
    ("llama-3.1-8b", "H200", 1, 500, 2000, 21_463),
    ("llama-3.1-8b", "H200", 1, 1000, 1000, 17_591),
    ("llama-3.1-8b", "H200", 1, 2048, 128, 3_531),
    ("llama-3.1-8b", "H200", 1, 2048, 2048, 12_022),
    ("llama-3.1-8b", "H200", 1, 5000, 500, 3_852),
    ("llama-3.1-8b", "H100", 1, 128, 128, 27_569),
    ("llama-3.1-8b", "H100", 1, 1000, 1000, 15_270),
    ("llama-3.1-8b", "H100", 1, 2048, 128, 3_495),
    ("llama-3.1-8b", "H100", 1, 5000, 500, 3_371),
    ("llama-3.1-70b", "H200", 1, 128, 2048, 4_351),
    ("llama-3.1-70b", "H200", 1, 1000, 1000, 2_727),
    ("llama-3.1-70b", "H200", 1, 2048, 2048, 1_990),
    ("llama-3.1-70b", "H100", 2, 1000, 1000, 4_191),
]


def simulated(model: str, device: str, tp: int, input_: int, output: int) -> float:
    case = Case(
        KNOWN[model], WeightBytes("fp8", head_format="bfloat16"), kv_dtype="fp8",
        layout=Layout(tp),
    )  # fmt: skip
    spec = ReplicaSpec(
        case, DEVICES[device], rows=1024, step_tokens=8192, max_context=input_ + output + 16,
        depth=2, prefix_cache=False,
    )  # fmt: skip
    options = RunOptions(
        url="simulated", requests=2048, concurrency=1024, input=str(input_), output=str(output)
    )
    result, run = Simulation(Cluster(spec, 1), options).run()
    # The middle half of the run: neither the first wave nor the last stragglers.
    quarter = (run.end_ns - run.start_ns) // 4
    low, high = run.start_ns + quarter, run.end_ns - quarter
    tokens = sum(low <= at < high for record in run.records for at in record.chunk_ns)
    assert result["succeeded"] == 2048
    return tokens / ((high - low) / 1e9)


def main() -> None:
    rows, errors = [], []
    for model, device, tp, input_, output, published in ROWS:
        begin = time.perf_counter()
        found = simulated(model, device, tp, input_, output)
        errors.append(abs(found / published - 1))
        rows.append([model, f"{tp}×{device}", input_, output, published, round(found)])
        print(
            f"{model} {tp}×{device} {input_}/{output}: published {published:,}, simulated "
            f"{found:,.0f}, ratio {found / published:.2f} ({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
    print(f"median error {median(errors):.0%}, worst {max(errors):.0%}")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump({"rows": rows, "median": median(errors), "worst": max(errors)}, file)


if __name__ == "__main__":
    main()
