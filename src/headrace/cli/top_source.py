"""Sources of `headrace top`: our statistics stream, or any server's Prometheus metrics.

The stream has a point a second and the active requests. Without it (a foreign or older server, a
key without permission), `/metrics` is read under vLLM's and NIM's names. Differences of two
readings give rates; a figure that a server does not count stays unknown.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ..base.errors import Forbidden, HeadraceError, InvalidRequest, NotFound, Unauthorised
from ..base.foreign import any_json

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
WINDOW_SECONDS = 30.0
"""Seconds over which latency quantiles are taken."""


@dataclass(slots=True)
class Reading:
    """The server at one moment; None: unknown."""

    source: str
    model: str = ""
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    output_rate: float | None = None
    prompt_rate: float | None = None
    first_token: dict[str, float] | None = None
    token_gap: dict[str, float] | None = None
    prefix_share: float | None = None
    roofline: float | None = None
    busy: float | None = None
    step_seconds: float | None = None
    batch: float | None = None
    preemptions: float | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    others: float | None = None


async def readings(client: httpx.AsyncClient, interval: float) -> AsyncGenerator[Reading]:
    """Yield readings as they come, from the better source. Raises `HeadraceError`."""
    try:
        async with aclosing(_streamed(client)) as found:
            async for reading in found:
                yield reading
        return
    except (NotFound, Forbidden):
        pass
    async with aclosing(_scraped(client, interval)) as found:
        async for reading in found:
            yield reading


def _check(response: httpx.Response) -> None:
    status = response.status_code
    if status < 400:
        return
    where = response.request.url.path
    if status == 401:
        raise Unauthorised("the server wants an API key: --key")
    if status == 403:
        raise Forbidden(f"{where} needs an operator's key")
    if status in (404, 405):
        raise NotFound(f"the server has no {where}")
    raise _Later(f"{where} answers {status}")


class _Later(HeadraceError):
    """The server is not ready, but may be in a moment."""


async def _streamed(client: httpx.AsyncClient) -> AsyncGenerator[Reading]:
    model = ""
    recent: deque[dict[str, Any]] = deque(maxlen=int(WINDOW_SECONDS))
    async with client.stream("GET", "v1/stats/stream") as response:
        _check(response)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise NotFound("this is no stream of statistics")
        event = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                event = line[7:]
            elif line.startswith("data: "):
                said = any_json(line[6:])
                if event == "snapshot":
                    model = said["server"]["model"]
                    recent.extend(said["points"])
                    if recent:
                        yield _of_point(model, recent, said["requests"])
                elif event == "point":
                    recent.append(said["point"])
                    yield _of_point(model, recent, said["requests"])


def _of_point(
    model: str, recent: Sequence[Mapping[str, Any]], requests: list[dict[str, Any]]
) -> Reading:
    point = recent[-1]
    lookups = sum(one["prefix_lookups"] for one in recent)
    return Reading(
        "statistics",
        model,
        output_rate=point["output_tokens_per_second"],
        prompt_rate=point["prompt_tokens_per_second"],
        first_token=point["time_to_first_token"],
        token_gap=point["inter_token_latency"],
        prefix_share=sum(one["prefix_hits"] for one in recent) / lookups if lookups else None,
        requests=requests,
        others=point.get("others"),
        **{name: point[name] for name in SAME},
    )


SAME = [
    "running",
    "waiting",
    "kv_usage",
    "roofline",
    "busy",
    "step_seconds",
    "batch",
    "preemptions",
]
"""Fields of a reading with the same names in a point."""


async def _scraped(client: httpx.AsyncClient, interval: float) -> AsyncGenerator[Reading]:
    scrapes: deque[Scrape] = deque()
    while True:
        response = await client.get("metrics")
        _check(response)
        scrape = Scrape(response.text)
        scrapes.append(scrape)
        while scrape.time - scrapes[0].time > WINDOW_SECONDS and len(scrapes) > 2:
            scrapes.popleft()
        if len(scrapes) > 1:
            yield difference(scrapes[0], scrapes[-2], scrape)
        await asyncio.sleep(interval)


class Scrape:
    """The samples of one reading of `/metrics`, summed over all labels except `le`."""

    def __init__(self, text: str, now: float | None = None) -> None:
        self.time = time.monotonic() if now is None else now
        self.values: dict[str, float] = {}
        self.buckets: dict[str, dict[float, float]] = {}
        self.model = ""
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self.model = self.model or sample.labels.get("model_name", "")
                    if sample.name.endswith("_bucket"):
                        held = self.buckets.setdefault(sample.name[: -len("_bucket")], {})
                        bound = float(sample.labels.get("le", "inf"))
                        held[bound] = held.get(bound, 0.0) + sample.value
                    else:
                        self.values[sample.name] = self.values.get(sample.name, 0.0) + sample.value
        except ValueError as error:
            raise InvalidRequest(f"/metrics is not in Prometheus' format: {error}") from None

    def first(self, *names: str) -> float | None:
        """Return the value under the first name that is present."""
        return next((self.values[name] for name in names if name in self.values), None)


def difference(oldest: Scrape, before: Scrape, now: Scrape) -> Reading:
    """Compute rates since `before`, latencies and shares since `oldest`."""
    seconds = max(now.time - before.time, 1e-9)

    def change(since: Scrape, *names: str) -> float | None:
        new, old = now.first(*names), since.first(*names)
        return None if new is None or old is None else max(0.0, new - old)

    def rate(*names: str) -> float | None:
        found = change(before, *names)
        return None if found is None else found / seconds

    def share(over: Iterable[str], under: Iterable[str]) -> float | None:
        part, whole = change(oldest, *over), change(oldest, *under)
        return part / whole if part is not None and whole else None

    steps = change(before, "headrace:steps_total")
    device = change(before, "headrace:device_seconds_total")
    predicted = change(oldest, "headrace:predicted_seconds_total")
    return Reading(
        "metrics",
        now.model,
        now.first("vllm:num_requests_running", "num_requests_running"),
        now.first("vllm:num_requests_waiting", "num_requests_waiting"),
        now.first("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "gpu_cache_usage_perc"),
        rate("vllm:generation_tokens_total", "generation_tokens_total"),
        rate("vllm:prompt_tokens_total", "prompt_tokens_total"),
        quantiles(oldest, now, "vllm:time_to_first_token_seconds", "time_to_first_token_seconds"),
        quantiles(
            oldest,
            now,
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
            "time_per_output_token_seconds",
        ),
        share(
            ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        ),
        share(("headrace:predicted_seconds_total",), ("headrace:device_seconds_total",))
        if predicted
        else None,
        None if device is None else min(1.0, device / seconds),
        device / steps if device is not None and steps else None,
        None,
        change(before, "vllm:num_preemptions_total"),
    )


def quantiles(before: Scrape, now: Scrape, *names: str) -> dict[str, float] | None:
    """Compute a histogram's p50, p90 and p99 between two readings, by its first known name."""
    name = next((name for name in names if name in now.buckets), None)
    if name is None:
        return None
    old = before.buckets.get(name, {})
    counts = sorted(
        (bound, value - old.get(bound, 0.0)) for bound, value in now.buckets[name].items()
    )
    total = counts[-1][1]
    if total <= 0:
        return None
    found = {}
    for share, part in SHARES.items():
        low, below = 0.0, 0.0
        for bound, upto in counts:
            if upto >= part * total:
                inside = (part * total - below) / (upto - below) if upto > below else 1.0
                # As in Prometheus: the last finite bound stands for all values above it.
                found[share] = low if bound == float("inf") else low + (bound - low) * inside
                break
            low, below = bound, upto
    return found
