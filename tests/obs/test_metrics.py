from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headrace.base.drafted import Verified
from headrace.base.request import StepStats
from headrace.obs.instruments import OTHER, Labelled, one_two_five
from headrace.obs.instruments import Histogram as Own
from headrace.obs.life import RequestLife
from headrace.obs.metrics import TOKEN_SECONDS, EngineMetrics

EXPECTED = Path(__file__).with_name("expected_names.txt").read_text().split()


def value(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})


def finish(metrics: EngineMetrics, reason: str = "stop") -> RequestLife:
    life = RequestLife(100.0, 50, max_tokens=20, scheduled=100.5, cached=16)
    metrics.tokens(life, 1, 101.0)
    for step in range(1, 5):
        metrics.between_tokens(0.02, 1)
        metrics.tokens(life, 1, 101.0 + step * 0.02)
    life.longest = 5
    metrics.ended(life, reason, 101.1)
    return life


def test_every_name_that_dashboards_ask_for_is_there_from_the_start() -> None:
    metrics = EngineMetrics("m")
    names = {
        sample.name
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
    }
    missing = [name for name in EXPECTED if name not in names]
    assert not missing


def test_a_request_fills_its_histograms() -> None:
    metrics = EngineMetrics("m")
    finish(metrics)
    assert value(metrics, "vllm:time_to_first_token_seconds_sum") == pytest.approx(1.0)
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "vllm:request_prefill_time_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "vllm:request_decode_time_seconds_sum") == pytest.approx(0.08)
    assert value(metrics, "vllm:request_inference_time_seconds_sum") == pytest.approx(0.58)
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(1.1)
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(0.02)
    assert value(metrics, "vllm:inter_token_latency_seconds_count") == 4
    assert value(metrics, "vllm:prompt_tokens_total") == 50
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 16
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 34
    assert value(metrics, "vllm:generation_tokens_total") == 5
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_max_num_generation_tokens_sum") == 5
    assert value(metrics, "vllm:request_params_max_tokens_sum") == 20


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("vllm:kv_cache_usage_perc", "gpu_cache_usage_perc"),
        ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        ("vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"),
        ("vllm:inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum"),
        ("vllm:generation_tokens_total", "generation_tokens_total"),
        ("vllm:num_requests_running", "num_requests_running"),
    ],
)
def test_old_and_new_names_agree(new: str, old: str) -> None:
    metrics = EngineMetrics("m")
    finish(metrics)
    metrics.step(StepStats(running=3, kv_usage=0.25, prefix_queries=10, prefix_hits=4))
    assert value(metrics, new) == value(metrics, old) != 0


def test_failures_and_successes_are_told_apart() -> None:
    metrics = EngineMetrics("m")
    for reason in ("stop", "length", "error", "abort"):
        finish(metrics, reason)
    assert value(metrics, "request_success_total") == 2
    assert value(metrics, "request_failure_total") == 1


def test_drafts_are_told_by_place_and_drafter() -> None:
    metrics = EngineMetrics("m")
    metrics.drafted.verified(Verified("suffix", 4, 3, spent=0.004, saved=0.03))
    metrics.drafted.verified(Verified("suffix", 2, 1, spent=0.002, saved=0.01))
    metrics.drafted.verified(Verified("ngram", 1, 0))
    place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, place, position=str(one)) for one in range(4)] == [2, 1, 1, None]
    assert value(metrics, "headrace:draft_tokens_total", drafter="suffix") == 6
    assert value(metrics, "headrace:accepted_draft_tokens_total", drafter="suffix") == 4
    assert value(metrics, "headrace:accepted_draft_tokens_total", drafter="ngram") == 0
    seconds = [
        value(metrics, "headrace:draft_seconds_total", kind=kind)
        for kind in ("saved", "spent", "vain")
    ]
    assert seconds == pytest.approx([0.04, 0.006, 0.002])


def test_totals_survive_a_restart_of_the_engine() -> None:
    metrics = EngineMetrics("m")
    metrics.step(StepStats(preemptions=5, prefix_queries=100, prefix_hits=40))
    metrics.step(StepStats(preemptions=6, prefix_queries=120, prefix_hits=40))
    metrics.step(StepStats(preemptions=6, prefix_queries=120, prefix_hits=40, accepted_tokens=3))
    metrics.begun(after_failure=True)
    metrics.step(StepStats(preemptions=1, prefix_queries=10, prefix_hits=0, accepted_tokens=4))
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 7
    assert value(metrics, "vllm:num_preemptions_total") == 7
    assert value(metrics, "vllm:prefix_cache_queries_total") == 130
    assert value(metrics, "vllm:prefix_cache_hits_total") == 40
    assert value(metrics, "headrace:engine_restarts_total") == 1
    metrics.begun(after_failure=False)  # It was put to sleep and woken.
    metrics.step(StepStats(preemptions=0, prefix_queries=4, prefix_hits=0))
    assert value(metrics, "vllm:prefix_cache_queries_total") == 134
    assert value(metrics, "headrace:engine_restarts_total") == 1


def test_two_engines_share_nothing() -> None:
    one, two = EngineMetrics("m"), EngineMetrics("m")
    finish(one)
    assert value(two, "vllm:generation_tokens_total") == 0


def test_own_histogram_equals_the_librarys() -> None:
    registry = CollectorRegistry()
    theirs = Histogram("h", "h", buckets=TOKEN_SECONDS, registry=registry)
    ours = Own(TOKEN_SECONDS, "h", "h")
    for seconds in (0.0, 0.009, 0.01, 0.011, 0.3, 79.9, 80.0, 81.0, *TOKEN_SECONDS):
        theirs.observe(seconds)
        ours.observe(seconds)
    for bound, count in ours.buckets():
        assert registry.get_sample_value("h_bucket", {"le": bound}) == count
    assert ours.total == pytest.approx(registry.get_sample_value("h_sum") or 0)


def test_labels_are_bounded() -> None:
    labelled = Labelled("n", "l", "h", "a", most=3)
    for place in range(100):
        labelled.add(f"v{place}")
    assert len(labelled.values) == 4
    assert labelled.values[OTHER] == 98
    assert sum(labelled.values.values()) == 100


def test_bounds_of_lengths() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]
    assert one_two_five(99)[-1] == 50


def test_where_the_time_of_steps_goes() -> None:
    metrics = EngineMetrics("m")
    for _ in range(2):
        metrics.step(
            StepStats(
                seconds=0.02,
                schedule_seconds=0.001,
                idle_seconds=0.002,
                predicted_seconds=0.015,
                launch_seconds=0.003,
            )
        )
    for name, expected in (
        ("device", 0.04),
        ("schedule", 0.002),
        ("idle", 0.004),
        ("predicted", 0.03),
        ("launch", 0.006),
    ):
        assert value(metrics, f"headrace:{name}_seconds_total") == pytest.approx(expected)
