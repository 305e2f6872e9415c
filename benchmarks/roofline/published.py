"""Simulated throughput next to what others published, as it is.

`python benchmarks/roofline/published.py [OUT.json [FIRST [LAST]]]` (a part of the rows; rows are
added to OUT.json). TensorRT-LLM's performance overview: output tokens/s at full load, per device
where a row has several. Nothing here was fitted to these rows: the curves are of single operators
(`operator_tables.py`), the time around them is assumed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from headrace.bench.options import RunOptions
from headrace.bench.virtual import Simulation
from headrace.engine.sim import Cluster, ReplicaSpec
from headrace.roofline.counts import Case, Layout
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import KNOWN
from headrace.roofline.weights import WeightBytes


class Row(NamedTuple):
    """One published figure."""

    model: str
    device: str
    layout: Layout
    input: int
    output: int
    tokens_per_second: float
    """Of one device."""
    format: str = "fp8"
    batch: int = 1024
    """Of each engine, at most."""


ONE, DEP4, DEP8 = Layout(), Layout(1, 1, True, 4), Layout(1, 1, True, 8)
ROWS = [
    Row("llama-3.1-8b", "H200", ONE, 128, 128, 28_447),
    Row("llama-3.1-8b", "H200", ONE, 128, 2048, 23_295),
    Row("llama-3.1-8b", "H200", ONE, 500, 2000, 21_463),
    Row("llama-3.1-8b", "H200", ONE, 1000, 1000, 17_591),
    Row("llama-3.1-8b", "H200", ONE, 2048, 128, 3_531),
    Row("llama-3.1-8b", "H200", ONE, 2048, 2048, 12_022),
    Row("llama-3.1-8b", "H200", ONE, 5000, 500, 3_852),
    Row("llama-3.1-8b", "H100", ONE, 128, 128, 27_569),
    Row("llama-3.1-8b", "H100", ONE, 1000, 1000, 15_270),
    Row("llama-3.1-8b", "H100", ONE, 2048, 128, 3_495),
    Row("llama-3.1-8b", "H100", ONE, 5000, 500, 3_371),
    Row("llama-3.1-70b", "H200", ONE, 128, 2048, 4_351),
    Row("llama-3.1-70b", "H200", ONE, 1000, 1000, 2_727),
    Row("llama-3.1-70b", "H200", ONE, 2048, 2048, 1_990),
    Row("llama-3.1-70b", "H100", Layout(2), 1000, 1000, 4_191 / 2),
    # The newer tables (1.1 / 1.2), per device.
    Row("llama-3.1-70b", "H200", Layout(2), 1000, 1000, 2_587),
    Row("llama-3.1-70b", "H100", Layout(2), 1000, 1000, 2_209),
    Row("llama-3.1-70b", "H200", Layout(2), 8192, 1024, 537),
    Row("llama-3.1-70b", "H100", Layout(2), 8192, 1024, 398),
    Row("qwen3-235b-a22b", "H200", DEP4, 1000, 1000, 3_288, batch=512),
    Row("qwen3-235b-a22b", "H100", DEP8, 1000, 1000, 1_932, batch=512),
    Row("deepseek-v3", "H200", DEP8, 1000, 1000, 1_627, batch=512),
    Row("qwen3-30b-a3b", "B200", ONE, 1000, 1000, 26_971, "nvfp4"),
    Row("gpt-oss-120b", "H200", ONE, 1000, 1000, 6_868, "int4"),
    Row("gpt-oss-120b", "H100", DEP4, 1000, 1000, 4_685, "int4", 512),
]


def simulated(row: Row) -> float:
    """Output tokens/s of one device in the middle half of a run at full load."""
    narrow = row.format in ("fp8", "nvfp4")
    case = Case(
        KNOWN[row.model], WeightBytes(row.format, head_format="bfloat16"),
        kv_dtype="fp8" if narrow else "bfloat16", layout=row.layout,
    )  # fmt: skip
    spec = ReplicaSpec(
        case, DEVICES[row.device], rows=row.batch, step_tokens=8192,
        max_context=row.input + row.output + 16, depth=2, prefix_cache=False,
    )  # fmt: skip
    cluster = Cluster(spec, 1)
    users = row.batch * len(cluster.replicas)
    options = RunOptions(
        url="simulated", requests=2 * users, concurrency=users, input=str(row.input),
        output=str(row.output),
    )  # fmt: skip
    result, run = Simulation(cluster, options).run()
    # Neither the first wave nor the last stragglers.
    quarter = (run.end_ns - run.start_ns) // 4
    low, high = run.start_ns + quarter, run.end_ns - quarter
    tokens = sum(low <= at < high for record in run.records for at in record.chunk_ns)
    assert result["succeeded"] == 2 * users
    return tokens / ((high - low) / 1e9) / cluster.devices


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    last = int(sys.argv[3]) if len(sys.argv) > 3 else len(ROWS)
    held: dict[str, Any] = json.loads(out.read_text()) if out and first and out.is_file() else {}
    rows: list[dict[str, Any]] = held.get("rows", [])
    for row in ROWS[first:last]:
        begin = time.perf_counter()
        found = simulated(row)
        rows.append(
            {"model": row.model, "device": row.device, "layout": str(row.layout),
             "format": row.format, "input": row.input, "output": row.output,
             "published": row.tokens_per_second, "simulated": round(found)}
        )  # fmt: skip
        print(
            f"| {row.model} | {row.device}, {row.layout} | {row.input} / {row.output} | "
            f"{row.tokens_per_second:,.0f} | {found:,.0f} | {found / row.tokens_per_second:.2f} | "
            f"({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
        errors = [abs(one["simulated"] / one["published"] - 1) for one in rows]
        if out is not None:
            held = {"rows": rows, "median": median(errors), "worst": max(errors)}
            out.write_text(json.dumps(held, indent=1) + "\n")
    print(f"median error {median(errors):.0%}, worst {max(errors):.0%}")


if __name__ == "__main__":
    main()
