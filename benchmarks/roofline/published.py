"""Predicted throughput next to what others published, as it is.

`python benchmarks/roofline/published.py OUT.json [--simulate NUMBER…]`. TensorRT-LLM's performance
overview: output tokens/s at full load, of one device. Predicted by the planner's steady state
(`roofline.steady`, in a moment), and for the rows named also by the simulator (a minute each).
Nothing here was fitted to these rows: the curves are of single operators (`operator_tables.py`),
the time around them is assumed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from headrace.bench.options import RunOptions
from headrace.bench.virtual import Simulation
from headrace.engine.sim import Cluster, ReplicaSpec
from headrace.roofline.counts import Case, Layout
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import KNOWN
from headrace.roofline.routing import typical_skew
from headrace.roofline.steady import Demand, Engine
from headrace.roofline.weights import WIDE_ENDS, WeightBytes


class Row(NamedTuple):
    """One published figure."""

    model: str
    device: str
    layout: Layout
    input: int
    output: int
    tokens_per_second: float
    """Rate of one device."""
    format: str = "fp8"
    batch: int = 1024
    """Batch of each engine, at most: assumed, it is not published with the figures."""


FEWER = 256
"""The same with at most so many sequences at a time: what that assumption is worth."""
ONE, DEP4, DEP8 = Layout(), Layout(1, 1, True, 4), Layout(1, 1, True, 8)
ROWS = [
    Row("llama-3.1-8b", "H200", ONE, 128, 128, 28_447),
    Row("llama-3.1-8b", "H200", ONE, 128, 2048, 23_295),
    Row("llama-3.1-8b", "H200", ONE, 500, 2000, 21_463),
    Row("llama-3.1-8b", "H200", ONE, 1000, 1000, 17_591),
    Row("llama-3.1-8b", "H200", ONE, 1000, 2000, 17_140),
    Row("llama-3.1-8b", "H200", ONE, 2048, 128, 3_531),
    Row("llama-3.1-8b", "H200", ONE, 2048, 2048, 12_022),
    Row("llama-3.1-8b", "H200", ONE, 5000, 500, 3_852),
    Row("llama-3.1-8b", "H200", ONE, 20_000, 2000, 1_706),
    Row("llama-3.1-8b", "H100", ONE, 128, 128, 27_569),
    Row("llama-3.1-8b", "H100", ONE, 128, 2048, 22_004),
    Row("llama-3.1-8b", "H100", ONE, 500, 2000, 17_794),
    Row("llama-3.1-8b", "H100", ONE, 1000, 1000, 15_270),
    Row("llama-3.1-8b", "H100", ONE, 1000, 2000, 13_850),
    Row("llama-3.1-8b", "H100", ONE, 2048, 128, 3_495),
    Row("llama-3.1-8b", "H100", ONE, 2048, 2048, 9_654),
    Row("llama-3.1-8b", "H100", ONE, 5000, 500, 3_371),
    Row("llama-3.1-8b", "H100", ONE, 20_000, 2000, 1_341),
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
    Row("deepseek-v3", "H200", DEP8, 1024, 8192, 1_218, batch=512),
    Row("qwen3-30b-a3b", "B200", ONE, 1000, 1000, 26_971, "nvfp4"),
    Row("gpt-oss-120b", "H200", ONE, 1000, 1000, 6_868, "int4"),
    Row("gpt-oss-120b", "H200", ONE, 8192, 1024, 1_828, "int4"),
    Row("gpt-oss-120b", "H100", DEP4, 1000, 1000, 4_685, "int4", 512),
    Row("gpt-oss-120b", "H100", DEP4, 8192, 1024, 1_169, "int4", 512),
    Row("gpt-oss-20b", "H200", ONE, 1000, 1000, 13_858, "int4"),
    Row("gpt-oss-20b", "H100", ONE, 1000, 1000, 11_557, "int4"),
]


def case_of(row: Row) -> Case:
    narrow = row.format in ("fp8", "nvfp4")
    return Case(
        KNOWN[row.model],
        WeightBytes(row.format, formats=WIDE_ENDS),
        kv_dtype="fp8" if narrow else "bfloat16",
        layout=row.layout,
        skew=typical_skew(KNOWN[row.model]),
    )


def simulated(row: Row) -> float:
    """Output tokens/s of one device in the middle half of a run at full load."""
    spec = ReplicaSpec(
        case_of(row),
        DEVICES[row.device],
        rows=row.batch,
        step_tokens=8192,
        max_context=row.input + row.output + 16,
        depth=2,
        prefix_cache=False,
    )
    cluster = Cluster(spec, 1)
    users = row.batch * len(cluster.replicas)
    options = RunOptions(
        url="simulated",
        requests=2 * users,
        concurrency=users,
        input=str(row.input),
        output=str(row.output),
    )
    result, run = Simulation(cluster, options).run()
    # Neither the first wave nor the last stragglers.
    quarter = (run.end_ns - run.start_ns) // 4
    low, high = run.start_ns + quarter, run.end_ns - quarter
    tokens = sum(low <= at < high for record in run.records for at in record.chunk_ns)
    assert result["succeeded"] == 2 * users
    return tokens / ((high - low) / 1e9) / cluster.devices


def steady(row: Row) -> float:
    """Output tokens/s of one device in the steady state at full load."""
    demand = Demand(1.0, row.input, row.output)
    engine = Engine(case_of(row), DEVICES[row.device], demand)
    state = engine.together(min(row.batch, engine.room()), 8192, 1.0)
    assert state is not None
    return state.rate * row.output * row.layout.engines / row.layout.devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--simulate", type=int, nargs="*", default=[])
    given = parser.parse_args()
    what = ("model", "device", "layout", "format", "input", "output", "published")
    before = {
        tuple(one[key] for key in what): one
        for one in (json.loads(given.out.read_text())["rows"] if given.out.is_file() else [])
    }
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(ROWS):
        entry: dict[str, Any] = {
            "model": row.model,
            "device": row.device,
            "layout": str(row.layout),
            "format": row.format,
            "input": row.input,
            "output": row.output,
            "published": row.tokens_per_second,
            "predicted": round(steady(row)),
            "predicted_fewer": round(steady(row._replace(batch=FEWER))),
        }
        if number in given.simulate:
            entry["simulated"] = round(simulated(row))
        elif "simulated" in (earlier := before.get(tuple(entry[key] for key in what), {})):
            entry["simulated"] = earlier["simulated"]
        rows.append(entry)
        ratio = entry["predicted"] / row.tokens_per_second
        print(
            f"| {row.model} | {row.device} {row.layout} | {row.format} | {row.input} / {row.output}"
            f" | {row.tokens_per_second:,.0f} | {entry['predicted']:,} | {ratio:.2f} | "
            f"{entry.get('simulated', '–')} |",
            flush=True,
        )
    result: dict[str, Any] = {"rows": rows}
    for name, dense in (("dense", True), ("mixtures", False)):
        for which in ("predicted", "predicted_fewer"):
            errors = [
                abs(one[which] / one["published"] - 1)
                for one in rows
                if (KNOWN[one["model"]].moe is None) is dense
            ]
            found = {"median": median(errors), "worst": max(errors), "rows": len(errors)}
            result.setdefault(name, {})[which] = found
            print(f"{name}, {which}: median error {median(errors):.0%}, worst {max(errors):.0%}")
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
