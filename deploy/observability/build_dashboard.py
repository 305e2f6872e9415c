"""Writes dashboard.json: Grafana's model is mostly repetition, so it is made, not typed.

    python deploy/observability/build_dashboard.py

A test holds the written file against this script.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SOURCE = {"type": "prometheus", "uid": "${source}"}
ONE = 'model_name=~"$model", instance=~"$instance"'


def rate(name: str, by: str = "model_name") -> str:
    return f"sum by ({by}) (rate({name}{{{ONE}}}[$__rate_interval]))"


def quantiles(name: str) -> list[tuple[str, str]]:
    return [
        (
            f"histogram_quantile({share}, {rate(name + '_bucket', 'model_name, le')})",
            f"p{share * 100:.0f} {{{{model_name}}}}",
        )
        for share in (0.5, 0.9, 0.99)
    ]


ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]], str]]]] = [
    (
        "What users feel",
        [
            ("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds"), ""),
            ("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds"), ""),
            ("Request latency", "s", quantiles("vllm:e2e_request_latency_seconds"), ""),
            ("Time in the queue", "s", quantiles("vllm:request_queue_time_seconds"), ""),
        ],
    ),
    (
        "Work",
        [
            (
                "Tokens per second",
                "short",
                [
                    (rate("vllm:generation_tokens_total"), "generated {{model_name}}"),
                    (rate("vllm:prompt_tokens_total"), "prompt {{model_name}}"),
                ],
                "",
            ),
            (
                "Requests per second",
                "reqps",
                [(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}")],
                "By how they ended: error is the server's doing, abort the client's.",
            ),
            (
                "Refused per second",
                "reqps",
                [(rate("vllm:admission_rejections_total", "reason"), "{{reason}}")],
                "Turned away before any work.",
            ),
            (
                "Sequences",
                "short",
                [
                    (
                        f"sum by (model_name) (vllm:num_requests_running{{{ONE}}})",
                        "running {{model_name}}",
                    ),
                    (
                        f"sum by (model_name) (vllm:num_requests_waiting{{{ONE}}})",
                        "waiting {{model_name}}",
                    ),
                ],
                "",
            ),
        ],
    ),
    (
        "Engine",
        [
            (
                "Share of the roofline",
                "percentunit",
                [
                    (
                        f"{rate('headrace:predicted_seconds_total')} "
                        f"/ ({rate('headrace:device_seconds_total')} > 0)",
                        "{{model_name}}",
                    )
                ],
                "Predicted over measured step time: 1 is what the hardware allows.",
            ),
            (
                "KV cache in use",
                "percentunit",
                [(f"vllm:kv_cache_usage_perc{{{ONE}}}", "{{instance}} {{model_name}}")],
                "",
            ),
            (
                "Prefix cache hits",
                "percentunit",
                [
                    (
                        f"{rate('vllm:prefix_cache_hits_total')} "
                        f"/ ({rate('vllm:prefix_cache_queries_total')} > 0)",
                        "{{model_name}}",
                    )
                ],
                "Share of prompt tokens found in the cache.",
            ),
            (
                "Device",
                "percentunit",
                [
                    (
                        f"rate(headrace:device_seconds_total{{{ONE}}}[$__rate_interval])",
                        "busy {{instance}}",
                    ),
                    (
                        f"rate(headrace:idle_seconds_total{{{ONE}}}[$__rate_interval])",
                        "waits though there is work {{instance}}",
                    ),
                    (
                        f"rate(headrace:schedule_seconds_total{{{ONE}}}[$__rate_interval])",
                        "planning {{instance}}",
                    ),
                ],
                "",
            ),
            ("Step time", "s", quantiles("headrace:step_seconds"), ""),
            ("Tokens per step", "short", quantiles("vllm:iteration_tokens_total"), ""),
            (
                "Preemptions per second",
                "short",
                [(rate("vllm:num_preemptions_total"), "{{model_name}}")],
                "Sequences that gave up their blocks and are computed again.",
            ),
            (
                "Arithmetic and traffic, estimated",
                "short",
                [
                    (rate("vllm:estimated_flops_per_gpu_total"), "FLOP/s {{model_name}}"),
                    (rate("vllm:estimated_read_bytes_per_gpu_total"), "bytes/s {{model_name}}"),
                ],
                "",
            ),
        ],
    ),
    (
        "Shape of the requests",
        [
            ("Prompt tokens", "short", quantiles("vllm:request_prompt_tokens"), ""),
            ("Generated tokens", "short", quantiles("vllm:request_generation_tokens"), ""),
            (
                "Prompt tokens by source",
                "short",
                [(rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}")],
                "",
            ),
            (
                "Generated tokens by adapter",
                "short",
                [(rate("headrace:adapter_generation_tokens_total", "adapter"), "{{adapter}}")],
                "",
            ),
        ],
    ),
    (
        "Health",
        [
            (
                "Engine up",
                "short",
                [(f"headrace:engine_up{{{ONE}}}", "{{instance}} {{model_name}}")],
                "",
            ),
            (
                "Seconds since the loop's last report",
                "s",
                [(f"headrace:engine_heartbeat_age_seconds{{{ONE}}}", "{{instance}}")],
                "",
            ),
            (
                "Failures and restarts",
                "short",
                [
                    (
                        "sum by (kind) "
                        f"(increase(headrace:failures_total{{{ONE}}}[$__rate_interval]))",
                        "{{kind}}",
                    ),
                    (
                        f"sum(increase(headrace:engine_restarts_total{{{ONE}}}[$__rate_interval]))",
                        "restarts",
                    ),
                ],
                "",
            ),
            (
                "HTTP answers per second",
                "reqps",
                [
                    (
                        "sum by (route, status) (rate(headrace_http_requests_total"
                        '{instance=~"$instance", route!="/metrics"}[$__rate_interval]))',
                        "{{status}} {{route}}",
                    )
                ],
                "499: the client left.",
            ),
        ],
    ),
]


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def panel(
    number: int, title: str, unit: str, targets: list[tuple[str, str]], note: str, x: int, y: int
) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": note,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": 6, "h": 8},
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never"},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(65 + place), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
            for place, (expr, legend) in enumerate(targets)
        ],
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, entries in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        for place, (name, unit, targets, note) in enumerate(entries):
            at = y + place // 4 * 8
            panels.append(panel(len(panels) + 1, name, unit, targets, note, place % 4 * 6, at))
        y += (len(entries) + 3) // 4 * 8
    return {
        "uid": "headrace",
        "title": "Headrace",
        "tags": ["headrace", "inference"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "graphTooltip": 1,
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                variable("model", "Model", "label_values(vllm:num_requests_running, model_name)"),
                variable(
                    "instance",
                    "Instance",
                    'label_values(vllm:num_requests_running{model_name=~"$model"}, instance)',
                ),
            ]
        },
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("dashboard.json").write_text(text(), encoding="utf-8")
