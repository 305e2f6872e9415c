"""The metrics of one engine, under names that dashboards know.

vLLM's names come first; its older aliases and NIM's unprefixed ones read the same numbers. Metrics
without a name elsewhere are called `headrace:`. Times are seconds. Each instrument says its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..base.request import StepStats
from .instruments import Exposition, Histogram, Labelled, one_two_five
from .life import RequestLife
from .part_metrics import DraftMetrics, EncodingMetrics, SplitMetrics, TierMetrics
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
STEP: tuple[tuple[str, str, Callable[[StepStats], float]], ...] = (
    ("headrace:device_seconds", "Time of steps on the device.", lambda s: s.seconds),
    ("headrace:schedule_seconds", "Time of planning steps.", lambda s: s.schedule_seconds),
    ("headrace:idle_seconds", "Time in which the device had no step though there was work.",
     lambda s: s.idle_seconds),
    ("headrace:predicted_seconds", "Time that the roofline expected of the steps.",
     lambda s: s.predicted_seconds),
    ("headrace:launch_seconds", "Of the expected time, what starting operators and steps takes.",
     lambda s: s.launch_seconds),
    ("vllm:estimated_flops_per_gpu", "Floating-point operations, estimated.", lambda s: s.flops),
    ("vllm:estimated_read_bytes_per_gpu", "Bytes read, estimated.", lambda s: s.bytes),
)  # fmt: skip
"""Counters (name, help, what is read) of what the statistics say of one step."""
SINCE_START: tuple[tuple[str, str, Callable[[StepStats], int]], ...] = (
    ("vllm:num_preemptions", "Sequences that gave up their blocks.", lambda s: s.preemptions),
    ("vllm:prefix_cache_queries vllm:gpu_prefix_cache_queries",
     "Tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("vllm:prefix_cache_hits vllm:gpu_prefix_cache_hits", "Tokens found in the prefix cache.",
     lambda s: s.prefix_hits),
    ("vllm:spec_decode_num_drafts", "Times that a sequence verified drafts.", lambda s: s.drafts),
    ("vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", lambda s: s.draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.",
     lambda s: s.accepted_tokens),
)  # fmt: skip
"""Counters of what they say of all steps since the start of the engine's process."""


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
        # fmt: off
        self._first_token = Histogram(FIRST_TOKEN_SECONDS,
            "vllm:time_to_first_token_seconds time_to_first_token_seconds",
            "Arrival to first token.")
        self._between_tokens = Histogram(TOKEN_SECONDS,
            "vllm:inter_token_latency_seconds vllm:time_per_output_token_seconds"
            " time_per_output_token_seconds", "Time between tokens.")
        self._per_token = Histogram(TOKEN_SECONDS, "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a request.")
        self._duration = Histogram(REQUEST_SECONDS,
            "vllm:e2e_request_latency_seconds e2e_request_latency_seconds", "Arrival to end.")
        self._queue = Histogram(REQUEST_SECONDS, "vllm:request_queue_time_seconds",
            "Arrival to first step.")
        self._inference = Histogram(REQUEST_SECONDS, "vllm:request_inference_time_seconds",
            "First step to last token.")
        self._prefill = Histogram(REQUEST_SECONDS, "vllm:request_prefill_time_seconds",
            "First step to first token.")
        self._decode = Histogram(REQUEST_SECONDS, "vllm:request_decode_time_seconds",
            "First token to last.")
        self._prompt_length = Histogram(lengths,
            "vllm:request_prompt_tokens request_prompt_tokens", "Prompt tokens.")
        self._answer_length = Histogram(lengths,
            "vllm:request_generation_tokens request_generation_tokens", "Generated tokens.")
        self._longest = Histogram(lengths, "vllm:request_max_num_generation_tokens",
            "Generated tokens of the longest choice.")
        self._max_tokens = Histogram(lengths, "vllm:request_params_max_tokens",
            "The max_tokens asked for.")
        self._computed = Histogram(lengths, "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens that were computed.")
        self._choices = Histogram(CHOICES, "vllm:request_params_n", "The n asked for.")
        self._preempted = Histogram((0, 1, 2, 5, 10), "vllm:request_num_preemptions",
            "Preemptions of a request.")
        self._step_tokens = Histogram(STEP_TOKENS, "vllm:iteration_tokens_total",
            "Tokens per step.")
        self._step_seconds = Histogram(STEP_SECONDS, "headrace:step_seconds",
            "Device time per step.")

        self._success = Labelled("vllm:request_success", "finished_reason",
            "Requests that ended, by reason.", "stop", "length", "abort", "error", "repetition")
        self._refused = Labelled("vllm:admission_rejections", "reason",
            "Requests turned away before any work.",
            "overloaded", "invalid", "context", "unavailable")
        self._failures = Labelled("headrace:failures", "kind", "Failures of the engine.",
            "death", "hang", "start", "step", "observer", "task", "thread")
        self._sources = Labelled("vllm:prompt_tokens_by_source", "source",
            "Prompt tokens, by where their KV came from.", "local_compute", "local_cache_hit")
        self._cached_sources = Labelled("vllm:prompt_tokens_cached_by_source", "source",
            "Prompt tokens found in a cache, by tier.", "device", "disk")
        self._adapter_requests = Labelled("headrace:adapter_requests", "adapter",
            "Requests that ended, by adapter.", most=MOST_ADAPTERS)
        self._adapter_tokens = Labelled("headrace:adapter_generation_tokens", "adapter",
            "Generated tokens, by adapter.", most=MOST_ADAPTERS)
        # fmt: on
        self._restarts = 0
        self._retried = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._steps = self._pictures = self._denoising_steps = 0
        self._sums = [0.0] * len(STEP)
        self._since, self._latest = [0] * len(SINCE_START), [0] * len(SINCE_START)
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
        for place, (_, _, read) in enumerate(STEP):
            self._sums[place] += read(stats)
        for place, (_, _, count) in enumerate(SINCE_START):
            value = count(stats)
            self._since[place] += max(0, value - self._latest[place])
            self._latest[place] = value
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
        self._latest = [0] * len(SINCE_START)

    # Exposition

    def collect(self) -> Iterator[Metric]:
        """Yield all families, as they are now."""
        x, stats, ended = self._exposition, self.stats, self._success.values
        waits = {"capacity": float(stats.waiting), "deferred": 0.0}
        # fmt: off
        yield from x.gauges("vllm:num_requests_waiting_by_reason",
            "Sequences that wait, by reason.", "reason", waits)
        yield from x.gauges("headrace:start_phase_seconds",
            "Duration of each phase of the latest start.", "phase", self.phases)
        for make, names, help_, value in (
            (x.gauge, "vllm:num_requests_running num_requests_running",
             "Sequences in work on the device.", stats.running),
            (x.gauge, "vllm:num_requests_waiting num_requests_waiting",
             "Sequences that wait to be worked on.", stats.waiting),
            (x.gauge, "vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc gpu_cache_usage_perc",
             "Share of the KV blocks in use, 0 to 1.", stats.kv_usage),
            (x.gauge, "num_request_max", "Sequences that can run at once.", self.rows),
            (x.gauge, "headrace:engine_up", "1 while requests are served.", self.up),
            (x.gauge, "headrace:engine_heartbeat_age_seconds",
             "Seconds since the step loop last reported.", self.heartbeat()),
            (x.counter, "vllm:prompt_tokens prompt_tokens", "Prompt tokens.", self._prompt_tokens),
            (x.counter, "vllm:prompt_tokens_cached", "Prompt tokens found in a cache.",
             self._cached_tokens),
            (x.counter, "vllm:generation_tokens generation_tokens", "Generated tokens.",
             self._generated_tokens),
            (x.counter, "request_success", "Requests answered in full.",
             ended.get("stop", 0.0) + ended.get("length", 0.0)),
            (x.counter, "request_failure", "Requests that ended with an error.",
             ended.get("error", 0.0)),
            (x.counter, "headrace:engine_restarts", "Starts of the engine after a failure.",
             self._restarts),
            (x.counter, "headrace:requests_retried",
             "Requests given to the next engine, unread, when theirs had died.", self._retried),
            (x.counter, "headrace:steps", "Steps.", self._steps),
            (x.counter, "headrace:pictures", "Finished pictures.", self._pictures),
            (x.counter, "headrace:denoising_steps", "Steps of finished pictures.",
             self._denoising_steps),
        ):
            yield from make(names, help_, value)
        # fmt: on
        rows = zip((*STEP, *SINCE_START), (*self._sums, *self._since), strict=True)
        for (names, help_, _), total in rows:
            yield from x.counter(names, help_, total)
        for owner in (self, self.drafted):
            yield from x.instruments(owner)
        split = SplitMetrics(stats.split) if stats.split else None
        for part in (self._tier, self._encodings, split):
            if part is not None:
                yield from (*x.instruments(part), *part.numbers(x))
        if self.cache_config:
            yield from x.info("vllm:cache_config_info", "The KV pool.", self.cache_config)
