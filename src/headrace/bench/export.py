"""Results in the JSON formats of other tools, for dashboards made for those."""

from __future__ import annotations

from typing import Any

import numpy as np

from .metrics import SAMPLES, sample
from .record import RequestRecord
from .statistics import PERCENTILES


def vllm_bench(result: dict[str, Any], records: list[RequestRecord]) -> dict[str, Any]:
    """Return the JSON of `vllm bench serve --save-result`; latencies in milliseconds."""
    options, figures, samples = result["options"], result["figures"], result["samples"]
    good = [record for record in records if record.ok]
    out: dict[str, Any] = {
        "date": result["created"],
        "endpoint_type": "openai-chat" if options["endpoint"] == "chat" else "openai",
        "backend": "headrace-bench",
        "label": None,
        "model_id": result["server"]["model"],
        "tokenizer_id": options["tokenizer"] or result["server"]["model"],
        "num_prompts": result["requests"],
        "request_rate": options["arrivals"] or "inf",
        "burstiness": 1.0,
        "max_concurrency": None if options["arrivals"] else options["concurrency"],
        "duration": result["seconds"],
        "completed": result["succeeded"],
        "failed": result["requests"] - result["succeeded"],
        "total_input_tokens": sum(r.prompt_tokens or r.known_prompt_tokens for r in good),
        "total_output_tokens": sum(record.tokens for record in good),
        "request_throughput": figures["request_throughput"]["value"],
        "request_goodput": figures.get("goodput", {}).get("value"),
        "output_throughput": figures["output_throughput"]["value"],
        "total_token_throughput": figures["total_throughput"]["value"],
        "input_lens": [r.prompt_tokens or r.known_prompt_tokens for r in good],
        "output_lens": [record.tokens for record in good],
        "ttfts": [(r.chunk_ns[0] - r.planned_ns) / 1e9 if r.chunk_ns else 0.0 for r in good],
        "itls": [
            [(b - a) / 1e9 for a, b in zip(r.chunk_ns[:-1], r.chunk_ns[1:], strict=True)]
            for r in good
        ],
        "latencies": [(record.end_ns - record.planned_ns) / 1e9 for record in good],
        "errors": [record.error or "" for record in records],
    }
    for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2el")):
        found = samples.get(ours)
        if found is None:
            continue
        out[f"mean_{theirs}_ms"] = found["mean"] * 1e3
        out[f"median_{theirs}_ms"] = found["percentiles"]["p50"] * 1e3
        out[f"std_{theirs}_ms"] = found["deviation"] * 1e3
        for percentile in PERCENTILES:
            out[f"p{percentile}_{theirs}_ms"] = found["percentiles"][f"p{percentile}"] * 1e3
    return out


_AIPERF_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_AIPERF = {
    "ttft": ("time_to_first_token", "ms", 1e3),
    "itl": ("inter_chunk_latency", "ms", 1e3),
    "tpot": ("inter_token_latency", "ms", 1e3),
    "e2e": ("request_latency", "ms", 1e3),
    "user_throughput": ("output_token_throughput_per_user", "tokens/sec/user", 1.0),
    "input_tokens": ("input_sequence_length", "tokens", 1.0),
    "output_tokens": ("output_sequence_length", "tokens", 1.0),
}


def aiperf(result: dict[str, Any], records: list[RequestRecord]) -> dict[str, Any]:
    """Return the metrics and the workload of AIPerf's `profile_export_aiperf.json` (schema 1.4).

    AIPerf's inter-token latency is our TPOT; its inter-chunk latency is our ITL.
    """
    figures, options = result["figures"], result["options"]
    metrics = {metric.name: metric for metric in SAMPLES}
    out: dict[str, Any] = {"schema_version": "1.4"}
    for ours, (theirs, unit, scale) in _AIPERF.items():
        values = np.asarray(sample(metrics[ours], records)) * scale
        if not values.size:
            continue
        out[theirs] = {
            "unit": unit,
            "avg": float(values.mean()),
            **{f"p{p}": float(np.percentile(values, p)) for p in _AIPERF_PERCENTILES},
            "min": float(values.min()),
            "max": float(values.max()),
            "std": float(values.std()),
            "count": int(values.size),
            "sum": float(values.sum()),
        }
    for ours, theirs in (("input_tokens", "total_isl"), ("output_tokens", "total_osl")):
        total = sum(sample(metrics[ours], records))
        out[theirs] = {"unit": "tokens", "avg": float(total)}
    for ours, theirs, unit in (
        ("output_throughput", "output_token_throughput", "tokens/sec"),
        ("request_throughput", "request_throughput", "requests/sec"),
        ("goodput", "goodput", "requests/sec"),
    ):
        if ours in figures:
            out[theirs] = {"unit": unit, "avg": figures[ours]["value"]}
    failed = result["requests"] - result["succeeded"]
    out["request_count"] = {"unit": "requests", "avg": float(result["succeeded"])}
    out["error_request_count"] = {"unit": "requests", "avg": float(failed)}
    out["benchmark_duration"] = {"unit": "sec", "avg": result["seconds"]}
    out["request_error_rate"] = {
        "unit": "%",
        "avg": 100 * failed / result["requests"] if result["requests"] else 0.0,
    }
    phase = {"name": "profiling", "kind": "profiling", "requests": result["requests"]}
    if options["arrivals"] is None:
        phase |= {"type": "concurrency", "concurrency": options["concurrency"]}
    else:
        phase |= {"type": options["arrivals"].partition(":")[0], "arrivals": options["arrivals"]}
    out["input_config"] = {
        "models": {"items": [{"name": result["server"]["model"]}]},
        "endpoint": {
            "urls": [result["server"]["url"]],
            "type": options["endpoint"] or "completions",
            "streaming": options["stream"],
        },
        "phases": [phase],
    }
    out["was_cancelled"] = result["interrupted"]
    out["is_complete"] = not result["interrupted"]
    return out
