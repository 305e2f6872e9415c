"""The metrics of one engine, under the names that dashboards know.

vLLM's names come first; its older aliases and NIM's unprefixed ones read the same numbers. Metrics
without a name elsewhere are called `headrace:`. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..base.request import StepStats
from .draft_metrics import DraftMetrics
from .encoding_metrics import EncodingMetrics
from .instruments import Exposition, Histogram, Labelled, one_two_five
from .life import RequestLife
from .sketch import Sketch
from .tier_metrics import TierMetrics

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
        """Fine counts of the two latencies, for read-outs of the last seconds."""
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
        self._device_seconds = 0.0
        self._schedule_seconds = 0.0
        self._idle_seconds = 0.0
        self._predicted_seconds = 0.0
        self._launch_seconds = 0.0
        self._flops = 0.0
        self._bytes = 0.0
        self._preemptions = _Restarting()
        self._prefix_queries = _Restarting()
        self._prefix_hits = _Restarting()
        self.drafted = DraftMetrics()
        self._tier = TierMetrics()
        self._encodings = EncodingMetrics()
        self._drafts = _Restarting()
        self._draft_tokens = _Restarting()
        self._accepted_tokens = _Restarting()
        self.registry.register(self)

    # Events

    def step(self, stats: StepStats) -> None:
        """Count a finished step."""
        self.stats = stats
        self._steps += 1
        self._step_tokens.observe(stats.tokens)
        self._step_seconds.observe(stats.seconds)
        self._device_seconds += stats.seconds
        self._schedule_seconds += stats.schedule_seconds
        self._idle_seconds += stats.idle_seconds
        self._predicted_seconds += stats.predicted_seconds
        self._launch_seconds += stats.launch_seconds
        self._flops += stats.flops
        self._bytes += stats.bytes
        self._preemptions.now(stats.preemptions)
        self._prefix_queries.now(stats.prefix_queries)
        self._prefix_hits.now(stats.prefix_hits)
        self._drafts.now(stats.drafts)
        self._draft_tokens.now(stats.draft_tokens)
        self._accepted_tokens.now(stats.accepted_tokens)
        if stats.tier is not None:
            self._tier.now(stats.tier)
        if stats.encodings is not None:
            self._encodings.now(stats.encodings)

    def drew(self, steps: int) -> None:
        """Count a finished picture and its steps."""
        self._pictures += 1
        self._denoising_steps += steps

    def tokens(self, life: RequestLife, count: int, now: float) -> None:
        """Count `count` further tokens of one choice of a request, which came at `now`."""
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
        """Count a request that is given to the successor of an engine that died with it."""
        self._retried += 1

    def failed(self, kind: str) -> None:
        """Count a failure: death, hang, start (of the engine), step, observer, task, thread."""
        self._failures.add(kind)

    def begun(self, *, after_failure: bool) -> None:
        """Begin with a new engine process: its own counts start at zero."""
        self._restarts += after_failure
        self._tier.restart()
        self._encodings.restart()
        for counter in (
            self._preemptions,
            self._prefix_queries,
            self._prefix_hits,
            self._drafts,
            self._draft_tokens,
            self._accepted_tokens,
        ):
            counter.restart()

    # Exposition

    def collect(self) -> Iterator[Metric]:
        """Yield all families, as they are now."""
        yield from self._state()
        yield from self._counters()
        yield from self.drafted.families(self._exposition)
        yield from self._tier.families(self._exposition, self.stats.split)
        yield from self._encodings.families(self._exposition)
        yield from self._histograms()

    def _state(self) -> Iterator[Metric]:
        x, stats = self._exposition, self.stats
        yield from x.gauge(
            "Sequences in work on the device.",
            stats.running,
            "vllm:num_requests_running",
            "num_requests_running",
        )
        yield from x.gauge(
            "Sequences that wait to be worked on.",
            stats.waiting,
            "vllm:num_requests_waiting",
            "num_requests_waiting",
        )
        yield from x.gauges(
            "Sequences that wait, by reason.",
            "reason",
            {"capacity": float(stats.waiting), "deferred": 0.0},
            "vllm:num_requests_waiting_by_reason",
        )
        yield from x.gauge(
            "Share of the KV blocks in use, 0 to 1.",
            stats.kv_usage,
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "gpu_cache_usage_perc",
        )
        yield from x.gauge("Sequences that can run at once.", self.rows, "num_request_max")
        if self.cache_config:
            yield from x.info("The KV pool.", "vllm:cache_config_info", self.cache_config)
        yield from x.gauge("1 while requests are served.", self.up, "headrace:engine_up")
        yield from x.gauge(
            "Seconds since the step loop last reported.",
            self.heartbeat(),
            "headrace:engine_heartbeat_age_seconds",
        )
        yield from x.gauges(
            "Duration of each phase of the latest start.",
            "phase",
            self.phases,
            "headrace:start_phase_seconds",
        )

    def _counters(self) -> Iterator[Metric]:
        x = self._exposition
        yield from x.counter(
            "Sequences that gave up their blocks.", self._preemptions.total, "vllm:num_preemptions"
        )
        yield from x.counter(
            "Tokens looked up in the prefix cache.",
            self._prefix_queries.total,
            "vllm:prefix_cache_queries",
            "vllm:gpu_prefix_cache_queries",
        )
        yield from x.counter(
            "Tokens found in the prefix cache.",
            self._prefix_hits.total,
            "vllm:prefix_cache_hits",
            "vllm:gpu_prefix_cache_hits",
        )
        yield from x.counter(
            "Times that a sequence verified drafts.",
            self._drafts.total,
            "vllm:spec_decode_num_drafts",
        )
        yield from x.counter(
            "Drafts that were verified.",
            self._draft_tokens.total,
            "vllm:spec_decode_num_draft_tokens",
        )
        yield from x.counter(
            "Drafts that were accepted.",
            self._accepted_tokens.total,
            "vllm:spec_decode_num_accepted_tokens",
        )
        yield from x.counter(
            "Prompt tokens.", self._prompt_tokens, "vllm:prompt_tokens", "prompt_tokens"
        )
        yield from x.counters(
            "Prompt tokens, by where their KV came from.",
            "source",
            self._sources,
            "vllm:prompt_tokens_by_source",
        )
        yield from x.counter(
            "Prompt tokens found in a cache.", self._cached_tokens, "vllm:prompt_tokens_cached"
        )
        yield from x.counters(
            "Prompt tokens found in a cache, by tier.",
            "source",
            self._cached_sources,
            "vllm:prompt_tokens_cached_by_source",
        )
        yield from x.counter(
            "Generated tokens.",
            self._generated_tokens,
            "vllm:generation_tokens",
            "generation_tokens",
        )
        yield from x.counters(
            "Requests that ended, by reason.",
            "finished_reason",
            self._success,
            "vllm:request_success",
        )
        good = sum(self._success.values.get(name, 0.0) for name in ("stop", "length"))
        yield from x.counter("Requests answered in full.", good, "request_success")
        bad = self._success.values.get("error", 0.0)
        yield from x.counter("Requests that ended with an error.", bad, "request_failure")
        yield from x.counters(
            "Requests that ended, by adapter.",
            "adapter",
            self._adapter_requests,
            "headrace:adapter_requests",
        )
        yield from x.counters(
            "Generated tokens, by adapter.",
            "adapter",
            self._adapter_tokens,
            "headrace:adapter_generation_tokens",
        )
        yield from x.counters(
            "Requests turned away before any work.",
            "reason",
            self._refused,
            "vllm:admission_rejections",
        )
        yield from x.counters(
            "Failures of the engine.", "kind", self._failures, "headrace:failures"
        )
        yield from x.counter(
            "Starts of the engine after a failure.", self._restarts, "headrace:engine_restarts"
        )
        yield from x.counter(
            "Requests given to the next engine, unread, when theirs had died.",
            self._retried,
            "headrace:requests_retried",
        )
        yield from x.counter("Steps.", self._steps, "headrace:steps")
        yield from x.counter("Finished pictures.", self._pictures, "headrace:pictures")
        steps = self._denoising_steps
        yield from x.counter("Steps of finished pictures.", steps, "headrace:denoising_steps")
        for help_, value, name in (
            ("Time of steps on the device.", self._device_seconds, "device"),
            ("Time of planning steps.", self._schedule_seconds, "schedule"),
            (
                "Time in which the device had no step though there was work.",
                self._idle_seconds,
                "idle",
            ),
            ("Time that the roofline expected of the steps.", self._predicted_seconds, "predicted"),
            (
                "Of the expected time, what starting operators and steps takes.",
                self._launch_seconds,
                "launch",
            ),
        ):
            yield from x.counter(help_, value, f"headrace:{name}_seconds")
        yield from x.counter(
            "Floating-point operations, estimated.", self._flops, "vllm:estimated_flops_per_gpu"
        )
        yield from x.counter(
            "Bytes read, estimated.", self._bytes, "vllm:estimated_read_bytes_per_gpu"
        )

    def _histograms(self) -> Iterator[Metric]:
        for help_, histogram, *names in (
            ("Tokens per step.", self._step_tokens, "vllm:iteration_tokens_total"),
            ("Device time per step.", self._step_seconds, "headrace:step_seconds"),
            (
                "Arrival to first token.",
                self._first_token,
                "vllm:time_to_first_token_seconds",
                "time_to_first_token_seconds",
            ),
            (
                "Time between tokens.",
                self._between_tokens,
                "vllm:inter_token_latency_seconds",
                "vllm:time_per_output_token_seconds",
                "time_per_output_token_seconds",
            ),
            (
                "Mean time between the tokens of a request.",
                self._per_token,
                "vllm:request_time_per_output_token_seconds",
            ),
            (
                "Arrival to end.",
                self._duration,
                "vllm:e2e_request_latency_seconds",
                "e2e_request_latency_seconds",
            ),
            ("Arrival to first step.", self._queue, "vllm:request_queue_time_seconds"),
            ("First step to last token.", self._inference, "vllm:request_inference_time_seconds"),
            ("First step to first token.", self._prefill, "vllm:request_prefill_time_seconds"),
            ("First token to last.", self._decode, "vllm:request_decode_time_seconds"),
            (
                "Prompt tokens.",
                self._prompt_length,
                "vllm:request_prompt_tokens",
                "request_prompt_tokens",
            ),
            (
                "Generated tokens.",
                self._answer_length,
                "vllm:request_generation_tokens",
                "request_generation_tokens",
            ),
            (
                "Generated tokens of the longest choice.",
                self._longest,
                "vllm:request_max_num_generation_tokens",
            ),
            ("The max_tokens asked for.", self._max_tokens, "vllm:request_params_max_tokens"),
            ("The n asked for.", self._choices, "vllm:request_params_n"),
            ("Preemptions of a request.", self._preempted, "vllm:request_num_preemptions"),
            (
                "Prompt tokens that were computed.",
                self._computed,
                "vllm:request_prefill_kv_computed_tokens",
            ),
        ):
            yield from self._exposition.histogram(help_, histogram, *names)


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
