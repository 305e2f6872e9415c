"""Answers of `/v1/stats`."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict


class Quantiles(TypedDict):
    """Latency in seconds, over the last half minute."""

    p50: float
    p90: float
    p99: float


class Point(TypedDict):
    """Statistics of one second of the engine."""

    time: float
    seconds: float
    running: int
    waiting: int
    kv_usage: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    steps_per_second: float
    batch: float
    step_seconds: float | None
    busy: float
    others: float | None
    """Share of the machine's processors that other programs use."""
    roofline: float | None
    prefix_lookups: int
    prefix_hits: int
    preemptions: int
    time_to_first_token: Quantiles | None
    inter_token_latency: Quantiles | None


class RunningRequest(TypedDict):
    id: str
    age: float
    state: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    """Tokens of all choices."""
    max_tokens: int | None
    choices: int


class ServerFacts(TypedDict):
    model: str
    version: str
    uptime: float
    ready: bool
    reason: str
    max_context: int
    max_sequences: int
    in_work: int
    features: list[str]
    decisions: list[dict[str, Any]]


class StatsReply(TypedDict):
    server: ServerFacts
    points: list[Point]
    requests: list[RunningRequest]
