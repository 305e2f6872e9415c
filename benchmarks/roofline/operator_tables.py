"""Predicted times of single operators next to a third party's measured tables.

`python benchmarks/roofline/operator_tables.py FOLDER OUT.json [--fit]`, where FOLDER is
`systems/data` of an unpacked `aiconfigurator-core` wheel (Apache-2.0; read at development time,
nothing of it is kept but the fitted shares). For each device and class of operator: the measured
time of a shape is the best of the frameworks in the tables (TensorRT-LLM, vLLM, SGLang, newest
version of each); the predicted one is `roofline.step.call_seconds` with the device's own curves.
`--fit` fits the curves anew on the shapes that are not held out, and prints them as
`roofline/curves.py` has them.

Held out are whole values of a dimension, not random rows: no neighbour of a held-out shape that
differs in nothing but the rows was seen.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from headrace.base.arch import Mla, ModelArch, Moe
from headrace.base.layout import Layout
from headrace.roofline.collectives import moved_bytes
from headrace.roofline.composition import Composition, decode_step, prefill_step
from headrace.roofline.counts import Case, Count, linear
from headrace.roofline.efficiency import Curve
from headrace.roofline.experts import moe
from headrace.roofline.hardware import DEVICES, Hardware
from headrace.roofline.operators import attention_counts
from headrace.roofline.step import call_seconds, compute_seconds, curve_names, memory_seconds
from headrace.roofline.weights import WeightBytes

FOLDERS = {
    "A100": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "L40S": "l40s",
}
FITTED_ON = 3000
"""Shapes of a class that a fit looks at, drawn from those not held out."""
SHARES = (
    "compute",
    "memory",
    "overlap",
    "floor_seconds",
    "depth_seconds",
    "piece_seconds",
)
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """One measured shape."""

    case: Case
    count: Count
    seconds: float
    held: bool
    usual: bool
    """Has it a size that steps of models consist of?"""


def arch(**sizes: Any) -> ModelArch:
    base = {
        "family": "llama",
        "vocab_size": 32_000,
        "hidden": 4096,
        "layers": 1,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "intermediate": 14_336,
        "max_context": 1 << 20,
        "norm_eps": 1e-5,
    }
    return ModelArch(**{**base, **sizes})


def newest(folder: Path, table: str) -> list[Path]:
    """The newest version's table of each framework."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob(f"*/*/*/{table}_perf.parquet"), key=lambda p: p.parts[-2]):
        found[path.parts[-3]] = path
    return list(found.values())


def with_defaults(path: Path) -> str:
    """A query of the table with the columns that older ones lack."""
    described = duckdb.connect().execute(f"describe select * from '{path}'").fetchall()
    names = {row[0] for row in described}
    missing = {"window_size": "0", "step": "0", "kernel_source": "''", "distribution": "'balanced'"}
    extra = [f"{value} as {name}" for name, value in missing.items() if name not in names]
    return f"select {', '.join(['*', *extra])} from '{path}'"


def best_rows(
    folder: Path, table: str, columns: str, where: str = "true"
) -> Iterator[tuple[Any, ...]]:
    """Distinct `columns` with the least latency in seconds among the frameworks."""
    files = newest(folder, table)
    if not files:
        return
    union = " union all ".join(
        f"select {columns}, latency from ({with_defaults(path)}) where {where} and latency > 0"
        for path in files
    )
    numbers = ", ".join(str(n + 1) for n in range(columns.count(",") + 1))
    query = f"select {columns}, min(latency) from ({union}) group by {numbers} order by {numbers}"
    for *values, latency in duckdb.connect().execute(query).fetchall():
        yield (*values, latency / 1e3)


def products(folder: Path, device: Hardware, type: str) -> Iterator[Row]:
    name = {"fp4": "nvfp4"}.get(type, type)
    if type not in device.rates:
        return
    for m, n, k, seconds in best_rows(folder, "gemm", "m, n, k", f"gemm_dtype = '{name}'"):
        case = Case(arch(), WeightBytes(name))
        count = linear(
            case,
            "table",
            "linear",
            n,
            k,
            m,
            1,
            1,
            weight_bytes=n * k * case.weights.bits("table") / 8,
        )
        held = n in (1536, 5120, 16_384) or k in (2560, 7168)
        yield Row(case, count, seconds, held, n >= 1024 and k >= 1024)


def of_attention(case: Case, step: Composition) -> Count:
    (count,) = attention_counts(case, step)
    return count


def prefills(folder: Path, _device: Hardware, type: str) -> Iterator[Row]:
    columns = "batch_size, isl, num_heads, num_key_value_heads, head_dim, kv_cache_dtype"
    where = f"attn_dtype = 'bfloat16' and window_size = 0 and step = 0 and head_dim = {type}"
    for batch, length, heads, kv, size, cache, seconds in best_rows(
        folder, "context_attention", columns, where
    ):
        model = arch(heads=heads, kv_heads=kv, head_dim=size)
        case = Case(model, kv_dtype=cache)
        count = of_attention(case, prefill_step(model, [length] * batch))
        held = length in (256, 1536, 6144)
        yield Row(case, count, seconds, held, length >= 16 and batch * length >= 256 and heads >= 8)


def decodes(folder: Path, _device: Hardware, type: str) -> Iterator[Row]:
    columns = "batch_size, step, num_heads, num_key_value_heads, head_dim, kv_cache_dtype"
    where = f"attn_dtype = 'bfloat16' and window_size = 0 and head_dim = {type}"
    for batch, past, heads, kv, size, cache, seconds in best_rows(
        folder, "generation_attention", columns, where
    ):
        model = arch(heads=heads, kv_heads=kv, head_dim=size)
        case = Case(model, kv_dtype=cache)
        count = of_attention(case, decode_step(model, batch, past))
        held = past in (127, 2047) or batch in (16, 256)
        yield Row(case, count, seconds, held, past >= 127 and heads >= 8)


def experts(
    distribution: str, skew: float = 0.0, *, spread: bool = False
) -> Callable[[Path, Hardware, str], Iterator[Row]]:
    """`spread`: on several ranks of expert parallelism, of which the tables have the busiest."""

    def rows(folder: Path, device: Hardware, type: str) -> Iterator[Row]:
        if type not in (*device.rates, "int4"):
            return
        columns = "num_tokens, hidden_size, inter_size, topk, num_experts, moe_tp_size, moe_ep_size"
        names = {
            "fp8": "('fp8', 'fp8_block')",
            "fp4": "('nvfp4')",
            "int4": "('w4a16_mxfp4')",
        }.get(type, f"('{type}')")
        ranks = "moe_ep_size between 2 and 32 and moe_tp_size = 1" if spread else "moe_ep_size = 1"
        where = (
            f"moe_dtype in {names} and distribution = '{distribution}' and {ranks}"
            " and inter_size / moe_tp_size >= 128 and kernel_source not like '%nongated%'"
            " and topk < 20"  # Of those some frameworks' rows are without gates, unmarked.
        )
        for tokens, hidden, inner, active, many, tp, ep, seconds in best_rows(
            folder, "moe", columns, where
        ):
            model = arch(hidden=hidden, moe=Moe(many, active, inner))
            layout = Layout(ep, ep=True) if spread else Layout(tp)
            format = {"fp4": "nvfp4"}.get(type, type)
            case = Case(model, WeightBytes(format), layout=layout, skew=skew)
            held = many == 160 or hidden == 5120 or tokens in (8, 96, 1024)
            yield Row(case, moe(case, tokens, 1, 1), seconds, held, many >= 8)

    return rows


DEEPSEEK = Mla(kv_rank=512, q_rank=1536, rope_dim=64, nope_dim=128, v_dim=128)


def latents(table: str) -> Callable[[Path, Hardware, str], Iterator[Row]]:
    """The tables' kernels are the attention alone: over the latent, or over unpacked heads."""

    def rows(folder: Path, _device: Hardware, _type: str) -> Iterator[Row]:
        columns = "batch_size, isl, step, num_heads, kv_cache_dtype"
        for batch, length, past, heads, cache, seconds in best_rows(
            folder, table, columns, "mla_dtype = 'bfloat16'"
        ):
            model = arch(
                family="deepseek_v3", heads=heads, kv_heads=heads, head_dim=192, mla=DEEPSEEK
            )
            case = Case(model, kv_dtype=cache)
            if table == "generation_mla":
                step = decode_step(model, batch, past)
                each = 2 * (512 + 64) + 2 * 512 + 5
            else:
                step = prefill_step(model, [length] * batch)
                each = 2 * 192 + 2 * 128 + 5
            flops = float(heads * step.attended[None].pairs * each)
            count = replace(of_attention(case, step), flops=flops, weight_bytes=0.0)
            held = batch in (4, 64)
            yield Row(case, count, seconds, held, heads >= 8 and (length > 63 or past > 127))

    return rows


def all_reduces(folder: Path, device: Hardware, _type: str) -> Iterator[Row]:
    """Message sizes are in numbers of two bytes; beyond what the frameworks' own kernels were
    measured for it is NCCL's."""
    found: dict[tuple[int, int], float] = {}
    for table, names, where in (
        ("custom_allreduce", "num_gpus, message_size", "allreduce_dtype = 'bfloat16'"),
        ("nccl", "num_gpus, message_size", "op_name = 'all_reduce' and nccl_dtype = 'half'"),
    ):
        for ranks, size, seconds in best_rows(folder, table, names, where):
            found[ranks, size] = min(seconds, found.get((ranks, size), seconds))
    for (ranks, size), seconds in sorted(found.items()):
        count = Count("all_reduce", "ranks", 1, "network", 0, read_bytes=2 * size, ranks=ranks)
        yield Row(Case(arch()), count, seconds, ranks == 4, 2 * size >= 16_384)


def exchanges(folder: Path, device: Hardware, _type: str) -> Iterator[Row]:
    """Dispatch and combine of DeepEP within a node: their mean, in µs in this table."""
    columns = "num_tokens, hidden_size, topk, ep_size, phase"
    where = "comm_dtype = 'bfloat16' and node_num = 1"
    found: dict[tuple[int, int, int, int], list[float]] = {}
    for *key, _phase, milliseconds in best_rows(folder, "moe_a2a", columns, where):
        found.setdefault(tuple(key), []).append(milliseconds / 1e3)
    for (tokens, hidden, active, ranks), seconds in sorted(found.items()):
        places = ranks * (1 - (1 - 1 / ranks) ** active)
        count = Count(
            "all_to_all",
            "exchange",
            1,
            "network",
            0,
            read_bytes=2 * tokens * hidden * places,
            ranks=ranks,
        )
        mean = sum(seconds) / len(seconds)
        yield Row(Case(arch()), count, mean, tokens in (8, 64, 512), tokens <= 4096)


CLASSES: dict[str, tuple[Callable[[Path, Hardware, str], Iterator[Row]], str]] = {
    "product/bfloat16": (products, "bfloat16"),
    "product/fp8": (products, "fp8"),
    "product/fp4": (products, "fp4"),
    "attention/prefill": (prefills, "128"),
    "attention/prefill/64": (prefills, "64"),
    "attention/decode": (decodes, "128"),
    "attention/decode/64": (decodes, "64"),
    "experts/bfloat16": (experts("balanced"), "bfloat16"),
    "experts/fp8": (experts("balanced"), "fp8"),
    "experts/fp8 uneven": (experts("power_law_1.2", 1.2), "fp8"),
    "experts/fp8 uneven, as if even": (experts("power_law_1.2"), "fp8"),
    "experts/fp8 spread": (experts("balanced", spread=True), "fp8"),
    "experts/fp8 uneven spread": (experts("power_law_1.2", 1.2, spread=True), "fp8"),
    "experts/fp8 uneven spread, as if even": (experts("power_law_1.2", spread=True), "fp8"),
    "experts/fp8 DeepSeek's spread": (experts("power_law_1.01", 1.01, spread=True), "fp8"),
    "experts/fp8 DeepSeek's spread, as if even": (experts("power_law_1.01", spread=True), "fp8"),
    "latent/prefill": (latents("context_mla"), ""),
    "latent/decode": (latents("generation_mla"), ""),
    "experts/fp4": (experts("balanced"), "fp4"),
    "experts/int4": (experts("balanced"), "int4"),
    "experts/int4 uneven": (experts("power_law_1.2", 1.2), "int4"),
    "experts/int4 uneven spread": (experts("power_law_1.2", 1.2, spread=True), "int4"),
    "all_reduce": (all_reduces, ""),
    "all_to_all": (exchanges, ""),
}


def fit(device: Hardware, name: str, rows: list[Row]) -> Curve:
    """The curve with the least mean of |log(predicted / measured)|, by coordinate search."""
    usable = [row for row in rows if not row.held and row.usual]
    usable = random.Random(0).sample(usable, min(len(usable), FITTED_ON))
    measured = np.array([row.seconds for row in usable])
    depth = np.array([row.count.depth for row in usable]) / 1e3
    pieces = np.array([row.count.pieces for row in usable]) / 1e3
    if name in ("all_reduce", "all_to_all"):
        compute = np.zeros(len(usable))
        memory = np.array([moved_bytes(r.count) / device.link_bandwidth for r in usable])
    else:
        compute = np.array([compute_seconds(r.case, device, r.count, padded=True) for r in usable])
        memory = np.array([memory_seconds(device, r.count) for r in usable])

    def cost(values: Array) -> float:
        work, wait = compute / values[0], memory / values[1]
        each = np.maximum(work, wait) + (1 - values[2]) * np.minimum(work, wait)
        each += values[3] + depth * values[4] + pieces * values[5]
        return float(np.mean(np.abs(np.log(each / measured))))

    low = np.array([0.02, 0.02, 0.01, 1e-7, 1e-10, 1e-10])
    high = np.array([1.1, 1.1, 1.0, 1e-3, 1e-4, 1e-4])
    values = np.array([0.6, 0.8, 0.7, 4e-6, 3e-7, 1e-6])
    best, stride = cost(values), 2.0
    while stride > 1.002:
        improved = False
        for index in range(len(values)):
            for factor in (stride, 1 / stride):
                trial = values.copy()
                trial[index] = np.clip(trial[index] * factor, low[index], high[index])
                found = cost(trial)
                if found < best * (1 - 1e-9):
                    values, best, improved = trial, found, True
        if not improved:
            stride = stride**0.5
    return Curve(**{key: float(f"{value:.3g}") for key, value in zip(SHARES, values, strict=True)})


def errors(device: Hardware, rows: list[Row]) -> Array:
    """|predicted / measured - 1| of the device's own curves."""
    return np.array(
        [
            abs(call_seconds(r.case, device, device.efficiency, r.count)[0] / r.seconds - 1)
            for r in rows
        ]
    )


def summary(found: Array) -> dict[str, float]:
    if not len(found):
        return {"shapes": 0}
    return {
        "shapes": len(found),
        "median": float(np.median(found)),
        "p90": float(np.quantile(found, 0.9)),
        "worst": float(found.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit the curves anew first")
    parser.add_argument("--devices", nargs="*", default=list(FOLDERS))
    parser.add_argument("--classes", nargs="*", default=list(CLASSES))
    given = parser.parse_args()
    result: list[dict[str, Any]] = []
    curves: dict[str, dict[str, Curve]] = {}
    print(
        "| device | operators | fitted shapes | median | p90 | worst | held out | median | p90 | "
        "worst | all sizes, median |"
    )
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name in given.devices:
        folder = FOLDERS[name]
        device = DEVICES[name]
        plain = replace(device, efficiency=replace(device.efficiency, curves={}))
        for label in given.classes:
            source, type = CLASSES[label]
            rows = list(source(given.folder / folder, device, type))
            if not rows:
                continue
            class_ = label.split(" ")[0]
            if given.fit and class_ == label:
                curves.setdefault(name, {})[class_] = fit(device, class_, rows)
                made = {**device.efficiency.curves, class_: curves[name][class_]}
                device = device.fitted(replace(device.efficiency, curves=made))
            usual = [row for row in rows if row.usual]
            assert class_ in curve_names(usual[0].case, device, usual[0].count), class_
            found = errors(device, usual)
            held = np.array([row.held for row in usual])
            entry = {
                "device": name,
                "operators": label,
                "fitted": summary(found[~held]),
                "held_out": summary(found[held]),
                "all_sizes": summary(errors(device, rows)),
                "assumed_shares": summary(errors(plain, usual)),
            }
            result.append(entry)
            texts = [name, label]
            for key in ("fitted", "held_out"):
                one = entry[key]
                texts.append(f"{one['shapes']:,}")
                texts += [
                    f"{one[q]:.0%}" if one["shapes"] else "–" for q in ("median", "p90", "worst")
                ]
            print(f"| {' | '.join(texts)} | {entry['all_sizes']['median']:.0%} |", flush=True)
    rows = ",\n ".join(map(json.dumps, result))
    given.out.write_text(f"[\n {rows}\n]\n")
    for name, found_curves in curves.items():
        for class_, curve in found_curves.items():
            shares = [f"{getattr(curve, key):g}" for key in SHARES[:3]]
            times = [f"{getattr(curve, key) * 1e6:g}" for key in SHARES[3:]]
            print(" ".join([name, class_, *shares, *times]))


if __name__ == "__main__":
    main()
