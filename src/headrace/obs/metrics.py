"""The metrics of one engine, under names that dashboards know.

vLLM's names come first; its older aliases and NIM's unprefixed ones read the same numbers. Metrics
without a name elsewhere are called `headrace:`. Times are seconds. `metrics.txt` has what each is
called and which attribute it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..base.request import StepStats
from ..base.sections import read_rows
from .instruments import Exposition, Histogram, Labelled, one_two_five
from .life import RequestLife
from .part_metrics import DraftMetrics, EncodingMetrics, TierMetrics
from .sketch import Sketch

FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CHOICES = (1, 2, 5, 10, 20)
MOST_ADAPTERS = 100
"""Adapters with series of their own; further ones are counted together as `other`."""
SUMMED = (
    "seconds", "schedule_seconds", "idle_seconds", "predicted_seconds", "launch_seconds", "flops",
    "bytes",
)  # fmt: skip
"""Fields of `StepStats` that are of one step."""
SINCE_START = (
    "preemptions", "prefix_queries", "prefix_hits", "drafts", "draft_tokens", "accepted_tokens",
)  # fmt: skip
"""Fields that count from the start of the engine's process."""


class _MetricRow(NamedTuple):
    """A row of `metrics.txt`."""

    kind: str
    label: list[str]
    path: list[str]
    help: str
    names: list[str]


def _metric(row: str) -> _MetricRow:
    head, attribute, help_, names = row.split(" | ")
    kind, *label = head.split()
    return _MetricRow(kind, label, attribute.split("."), help_, names.split())


TABLE = read_rows(Path(__file__).with_suffix(".txt"), _metric)


class EngineMetrics(Collector):
    """Counters of one engine. Every method is cheap, bounded and belongs to one thread."""

    def __init__(
        self, model_name: str, *, engine: str = "0", max_context: int = 131072, rows: int = 0
    ) -> None:
        self.registry = CollectorRegistry()
        self._exposition = Exposition(model_name=model_name, engine=engine)
        self.rows = rows
        self.cache_config: dict[str, str] = {}
        self.phases: dict[str, float] = {}
        self.stats = StepStats()
        self.up = 0.0
        self.heartbeat: Callable[[], float] = lambda: 0.0
        """Seconds since the step loop last reported; called on a scrape."""

        self.first_tokens = Sketch()
        self.token_gaps = Sketch()
        """Finely binned counts of the two latencies, for quantiles of the last seconds."""
        lengths = one_two_five(max_context)
        self._first_token = Histogram(FIRST_TOKEN_SECONDS)
        self._between_tokens = Histogram(TOKEN_SECONDS)
        self._per_token = Histogram(TOKEN_SECONDS)
        self._duration = Histogram(REQUEST_SECONDS)
        self._queue = Histogram(REQUEST_SECONDS)
        self._inference = Histogram(REQUEST_SECONDS)
        self._prefill = Histogram(REQUEST_SECONDS)
        self._decode = Histogram(REQUEST_SECONDS)
        self._prompt_length = Histogram(lengths)
        self._answer_length = Histogram(lengths)
        self._longest = Histogram(lengths)
        self._max_tokens = Histogram(lengths)
        self._computed = Histogram(lengths)
        self._choices = Histogram(CHOICES)
        self._preempted = Histogram((0, 1, 2, 5, 10))
        self._step_tokens = Histogram(STEP_TOKENS)
        self._step_seconds = Histogram(STEP_SECONDS)

        self._success = Labelled("stop", "length", "abort", "error", "repetition")
        self._refused = Labelled("overloaded", "invalid", "context", "unavailable")
        self._failures = Labelled("death", "hang", "start", "step", "observer", "task", "thread")
        self._sources = Labelled("local_compute", "local_cache_hit")
        self._cached_sources = Labelled("device", "disk")
        self._adapter_requests = Labelled(most=MOST_ADAPTERS)
        self._adapter_tokens = Labelled(most=MOST_ADAPTERS)
        self._restarts = 0
        self._retried = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._steps = self._pictures = self._denoising_steps = 0
        self._sums = dict.fromkeys(SUMMED, 0.0)
        self._since = {name: _Restarting() for name in SINCE_START}
        self.drafted = DraftMetrics()
        self._tier = TierMetrics()
        self._encodings: EncodingMetrics | None = None
        self.registry.register(self)

    # Events

    def step(self, stats: StepStats) -> None:
        """Count a finished step."""
        self.stats = stats
        self._steps += 1
        self._step_tokens.observe(stats.tokens)
        self._step_seconds.observe(stats.seconds)
        for name in SUMMED:
            self._sums[name] += getattr(stats, name)
        for name, counter in self._since.items():
            counter.now(getattr(stats, name))
        if stats.tier is not None:
            self._tier.now(stats.tier)
        if stats.encodings is not None:
            self._encodings = self._encodings or EncodingMetrics()
            self._encodings.now(stats.encodings)

    def drew(self, steps: int) -> None:
        """Count a finished picture and its steps."""
        self._pictures += 1
        self._denoising_steps += steps

    def tokens(self, life: RequestLife, count: int, now: float) -> None:
        """Count `count` further tokens of one choice of a request, received at `now`."""
        self._generated_tokens += count
        if not life.generated:
            life.first_token = now
            self._first_token.observe(life.ttft)
            self.first_tokens.observe(life.ttft)
            self._prompt_tokens += life.prompt_tokens
            self._cached_tokens += life.cached
            self._sources.add("local_compute", life.prompt_tokens - life.cached)
            self._sources.add("local_cache_hit", life.cached)
            self._cached_sources.add("device", life.cached - life.loaded)
            self._cached_sources.add("disk", life.loaded)
        life.generated += count
        life.last_token = now

    def between_tokens(self, seconds: float, count: int, choices: int = 1) -> None:
        """Count `count` tokens for each of `choices` choices, `seconds` after the previous."""
        self._between_tokens.observe(seconds / count, count * choices)
        self.token_gaps.observe(seconds / count, count * choices)

    def ended(self, life: RequestLife, reason: str, now: float) -> None:
        """Count the end of a request."""
        life.reason = reason
        self._success.add(reason)
        if life.adapter is not None:
            self._adapter_requests.add(life.adapter)
            self._adapter_tokens.add(life.adapter, life.generated)
        self._duration.observe(now - life.arrival)
        self._prompt_length.observe(life.prompt_tokens)
        self._answer_length.observe(life.generated)
        self._longest.observe(life.longest)
        self._max_tokens.observe(life.max_tokens)
        self._choices.observe(life.choices)
        self._preempted.observe(life.preemptions)
        if life.scheduled:
            self._queue.observe(life.queue)
        if life.generated:
            self._prefill.observe(life.prefill)
            self._decode.observe(life.decode)
            self._inference.observe(life.inference)
            self._computed.observe(life.prompt_tokens - life.cached)
            per_token = life.time_per_token
            if per_token is not None:
                self._per_token.observe(per_token)

    def refused(self, reason: str) -> None:
        """Count a request refused before any work: overloaded, invalid, context, unavailable."""
        self._refused.add(reason)

    def retried(self) -> None:
        """Count a request that is resent to a new engine after its engine died."""
        self._retried += 1

    def failed(self, kind: str) -> None:
        """Count a failure: death, hang, start (of the engine), step, observer, task, thread."""
        self._failures.add(kind)

    def begun(self, *, after_failure: bool) -> None:
        """Note a new engine process, whose own counts start at zero."""
        self._restarts += after_failure
        self._tier.restart()
        if self._encodings is not None:
            self._encodings.restart()
        for counter in self._since.values():
            counter.restart()

    # Exposition

    def collect(self) -> Iterator[Metric]:
        """Yield all families, as they are now."""
        for kind, label, path, help_, names in TABLE:
            if (found := _found(self, path)) is not None:
                make = getattr(self._exposition, f"{kind}s" if label else kind)
                yield from make(help_, *label, found, *names)
        if self.cache_config:
            yield from self._exposition.info(
                "The KV pool.", "vllm:cache_config_info", self.cache_config
            )

    @property
    def _age(self) -> float:
        return self.heartbeat()

    @property
    def _waiting_by_reason(self) -> dict[str, float]:
        return {"capacity": float(self.stats.waiting), "deferred": 0.0}

    @property
    def _good(self) -> float:
        return sum(self._success.values.get(name, 0.0) for name in ("stop", "length"))

    @property
    def _bad(self) -> float:
        return self._success.values.get("error", 0.0)

    @property
    def _split_prompts(self) -> Labelled | None:
        """Prompts by their end; counts restart with the engine's process."""
        if self.stats.split is None:
            return None
        prompts = Labelled()
        for end in ("brought", "declined", "failed", "left", "here", "computed", "refused"):
            prompts.add(end, getattr(self.stats.split, end))
        return prompts


def _found(metrics: EngineMetrics, path: list[str]) -> Any:
    """Return what a path leads to; None if the engine has no such part."""
    found: Any = metrics
    for name in path:
        if found is None:
            return None
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    return found


class _Restarting:
    """A total over engine processes that each count from 0."""

    __slots__ = ("_latest", "total")

    def __init__(self) -> None:
        self.total = 0
        self._latest = 0

    def now(self, value: int) -> None:
        self.total += max(0, value - self._latest)
        self._latest = value

    def restart(self) -> None:
        self._latest = 0
