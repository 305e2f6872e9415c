"""The result of a run: one JSON document with a versioned schema, and its reader."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import InvalidRequest
from ..base.hardware import cpu, gpus
from ..base.version import VERSION, revision
from .audit import Finding, send_lags
from .metrics import FIGURES, SAMPLES, Run, Slo, e2e, itl, sample, ttft
from .record import ClientAudit, RequestRecord
from .statistics import describe

SCHEMA = "headrace.bench.run/1"
THROUGHPUT, LATENCY = "offline throughput", "offline latency"
"""`kind` of a result of the engine in this process; a run over HTTP has no `kind`."""
MANY = 400
"""Number of values from which a histogram omits the largest 0.5 %."""
TIMELINE_POINTS = 120


def summarise(run: Run, rates: Run | None = None) -> dict[str, Any]:
    """Compute all metrics: figures by name (of `rates`, if given), samples as distributions."""
    figures = {}
    for figure in FIGURES:
        value = figure.value(rates or run)
        if value is not None:
            figures[figure.name] = {"value": value, "unit": figure.unit}
    samples = {}
    for metric in SAMPLES:
        found = describe(sample(metric, run.records))
        if found is not None:
            samples[metric.name] = {"unit": metric.unit, **asdict(found)}
    return {"figures": figures, "samples": samples}


def slo_verdict(slo: Slo | None, run: Run) -> dict[str, Any] | None:
    if slo is None:
        return None
    checks = [
        {
            "metric": limit.metric,
            "percentile": limit.percentile,
            "limit": limit.seconds,
            "value": None if value is None or value == float("inf") else value,
            "kept": kept,
        }
        for limit, value, kept in slo.check(run.records)
    ]
    return {"text": slo.text, "met": all(check["kept"] for check in checks), "checks": checks}


def timeline(run: Run) -> dict[str, list[float]]:
    """Compute per slice: seconds from the start, output pieces/s, requests in flight, TTFT."""
    count = max(1, min(TIMELINE_POINTS, int(run.seconds * 10) or 1))
    edges = np.linspace(run.start_ns, run.end_ns, count + 1)
    width = (edges[1] - edges[0]) / 1e9
    good = run.good
    chunks = np.array([t for record in good for t in record.chunk_ns] or [run.start_ns])
    per_chunk = sum(r.tokens for r in good) / max(1, sum(len(r.chunk_ns) for r in good))
    rate = np.histogram(chunks, edges)[0] / width * per_chunk
    sent = np.sort([record.sent_ns for record in run.records])
    ended = np.sort([record.end_ns for record in run.records])
    flying = np.searchsorted(sent, edges[1:]) - np.searchsorted(ended, edges[1:])
    first = sorted((r.planned_ns, (r.chunk_ns[0] - r.planned_ns) / 1e9) for r in good if r.chunk_ns)
    stride = max(1, len(first) // 1000)
    return {
        "seconds": [float(t - run.start_ns) / 1e9 for t in edges[1:]],
        "tokens_per_second": [float(value) for value in rate],
        "in_flight": [float(value) for value in flying],
        "ttft_at": [(planned - run.start_ns) / 1e9 for planned, _ in first[::stride]],
        "ttft": [value for _, value in first[::stride]],
    }


def histogram(values: list[float]) -> dict[str, list[float]]:
    """Compute shares per bin, and the cumulative curve.

    Bins reach from the least value to the largest, or to the 99.5th percentile of many values:
    otherwise an outlier would squeeze all others into a single bar.
    """
    if not values:
        return {"edges": [], "shares": [], "quantiles": []}
    data = np.asarray(values)
    top = float(np.percentile(data, 99.5) if data.size >= MANY else data.max())
    low = float(data.min())
    counts, edges = np.histogram(data, 40, (low, top if top > low else low + 1e-9))
    return {
        "edges": [float(edge) for edge in edges],
        "shares": [float(count) / data.size for count in counts],
        "quantiles": [float(value) for value in np.percentile(data, range(101))],
    }


def audit_summary(records: list[RequestRecord], audits: list[ClientAudit]) -> dict[str, Any]:
    lags = [lag / 1e9 for audit in audits for lag in audit.lag_ns]
    delays = send_lags(records)
    return {
        "loop_lag_p99": float(np.percentile(lags, 99)) if lags else None,
        "loop_lag_max": max(lags, default=None),
        "send_delay_p99": float(np.percentile(delays, 99)) if delays else None,
        "cpu_share": [a.cpu_seconds / a.wall_seconds if a.wall_seconds else 0.0 for a in audits],
        "connections": sum(audit.connections for audit in audits),
    }


def machine() -> dict[str, Any]:
    """Describe the client's machine; the server reports its own."""
    facts = cpu()
    return {
        "cpu": facts.name,
        "cores": facts.cores,
        "memory": facts.memory,
        "gpus": [gpu.name for gpu in gpus()],
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def document(
    *,
    run: Run,
    options: dict[str, Any],
    server: dict[str, Any],
    audits: list[ClientAudit],
    findings: list[Finding],
    interrupted: bool,
    rates: Run | None = None,
) -> dict[str, Any]:
    """Return everything as JSON.

    `rates`: the requests that ended in the run's time, if `run` has those that arrived in it.
    """
    records = list(run.records)
    return {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "headrace": VERSION,
        "commit": revision(),
        "machine": machine(),
        "server": server,
        "options": options,
        "valid": not any(finding.severity == "invalid" for finding in findings),
        "interrupted": interrupted,
        "findings": [finding._asdict() for finding in findings],
        "seconds": run.seconds,
        "requests": len(records),
        "succeeded": len(run.good),
        **summarise(run, rates),
        "slo": slo_verdict(run.slo, run),
        "audit": audit_summary(records, audits),
        "timeline": timeline(run),
        "histograms": {one.name: histogram(sample(one, records)) for one in (ttft, itl, e2e)},
    }


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file, or a folder's `result.json`; `InvalidRequest` describes the error."""
    path = path / "result.json" if path.is_dir() else path
    if not path.is_file():
        raise InvalidRequest(f"no result at {path}", param="result")
    try:
        data = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        kept = path.with_name("requests.jsonl")
        where = f"; what was measured is in {kept}" if kept.is_file() else ""
        raise InvalidRequest(f"{path} is not whole JSON ({error}){where}", param="result") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise InvalidRequest(f"{path} is no {SCHEMA} document but {found!r}", param="result")
    return data
