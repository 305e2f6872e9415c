"""The server's own histograms compared with the client's figures of the same run.

Reads the Prometheus text of `/metrics` before and after. Names are vLLM's, which we and many others
use. The server does not see the network and its own accept queue, so its times may be a little
shorter than the client's. A large difference means that something between them waits.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from .audit import Finding
from .http import Address, ConnectionLost, fetch
from .record import RequestRecord

HISTOGRAMS = {
    "ttft": ("vllm:time_to_first_token_seconds", "time_to_first_token_seconds"),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "e2e": ("vllm:e2e_request_latency_seconds", "e2e_request_latency_seconds"),
    "queue": ("vllm:request_queue_time_seconds",),
}
APART = 0.25
"""Relative difference of the means from which the two disagree."""
FLOOR = 0.02

Sums = dict[str, tuple[float, float]]
"""Metric → (sum, count)."""

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+([-+\deE.]+)")


def parse_metrics(text: str) -> Sums:
    """Parse sums and counts of the known histograms, over all label values."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None:
            name, value = match.groups()
            totals[name] = totals.get(name, 0.0) + float(value)
    found: Sums = {}
    for metric, names in HISTOGRAMS.items():
        for name in names:
            if f"{name}_sum" in totals and f"{name}_count" in totals:
                found[metric] = (totals[f"{name}_sum"], totals[f"{name}_count"])
                break
    return found


def read_metrics(address: Address) -> Sums:
    """Read the server's sums; empty if it reports none."""
    try:
        status, body = asyncio.run(fetch(address, "GET", "/metrics", timeout=10))
    except ConnectionLost:
        return {}
    return parse_metrics(body.decode(errors="replace")) if status == 200 else {}


def means(before: Sums, after: Sums) -> dict[str, dict[str, float]]:
    """Return mean and count of the observations between two readings."""
    found = {}
    for metric, (total, count) in after.items():
        earlier = before.get(metric, (0.0, 0.0))
        between = count - earlier[1]
        if between > 0:
            found[metric] = {"mean": (total - earlier[0]) / between, "count": between}
    return found


def cross_check(
    server: dict[str, dict[str, float]], records: Sequence[RequestRecord], *, stream: bool = True
) -> tuple[dict[str, Any], list[Finding]]:
    """Return ({metric: {client, server}} in mean seconds, findings of disagreement).

    Without streaming the client sees only ends, but the server its own first tokens.
    """
    good = [record for record in records if record.ok]
    streamed = [record for record in good if record.chunk_ns and stream]
    values = {
        "ttft": [(r.chunk_ns[0] - r.sent_ns) / 1e9 for r in streamed],
        "itl": [
            (r.chunk_ns[-1] - r.chunk_ns[0]) / 1e9 / (r.tokens - 1)
            for r in streamed
            if r.tokens > 1
        ],
        "e2e": [(r.end_ns - r.sent_ns) / 1e9 for r in good],
    }
    table: dict[str, Any] = {}
    findings = []
    for metric, own in server.items():
        seen = values.get(metric)
        table[metric] = {"server": own["mean"], "client": None}
        if not seen:
            continue
        client = sum(seen) / len(seen)
        table[metric]["client"] = client
        if abs(client - own["mean"]) > max(FLOOR, APART * own["mean"]):
            findings.append(
                Finding(
                    "warning",
                    f"disagree_{metric}",
                    f"the server's own mean {metric} is {own['mean'] * 1e3:.1f} ms, the client "
                    f"saw {client * 1e3:.1f} ms: something between them waits, or another client "
                    "was there too",
                )
            )
    return table, findings
