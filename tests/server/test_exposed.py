"""Samples of a server's metrics, read for the soaks."""

from __future__ import annotations

import pytest
from exposed import metric
from prometheus_client import generate_latest

from headrace.base.request import StepStats
from headrace.base.split import SplitStats
from headrace.obs.metrics import EngineMetrics


def exposed() -> str:
    metrics = EngineMetrics("m")
    metrics.stats = StepStats(split=SplitStats(handed=5, brought=3, failed=2, lent_bytes=80))
    return generate_latest(metrics.registry).decode()


def test_a_sample_is_found_by_its_labels() -> None:
    text = exposed()
    assert metric(text, "headrace:split_prompts_total", end="brought") == 3
    assert metric(text, "headrace:split_prompts_total") == 5
    assert metric(text, "headrace:split_lent_bytes_total") == 80


def test_a_sample_that_is_not_there_is_no_zero() -> None:
    for name, labels in (("headrace:split_prompt", {}), ("headrace:split_servers", {"end": "x"})):
        with pytest.raises(AssertionError, match="there is no metric"):
            metric(exposed(), name, **labels)
