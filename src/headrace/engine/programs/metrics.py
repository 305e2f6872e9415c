"""Counts of the executor, for `/metrics`. Times are seconds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class ProgramMetrics(Collector):
    """Instruments in a registry of their own, and gauges read from the engine as it is scraped."""

    def __init__(self, engine: Any) -> None:
        """Count for a `ProgramEngine`."""
        self._engine = engine
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
        self.runs = counter(
            "headrace_program_runs",
            "Runs by how they ended: run, left, missed_waiting, missed_running, killed, or the "
            "code of an error.",
            ["model_name", "outcome"],
        )
        self.waited = histogram(
            "headrace_program_wait_seconds",
            "From a request to the begin of its run.",
            ["model_name"],
        )
        self.ran = histogram(
            "headrace_program_run_seconds", "From a run's begin to its answer.", ["model_name"]
        )
        self.slack = histogram(
            "headrace_program_slack_seconds",
            "From the end of a run that was in time to its deadline.",
            ["model_name"],
        )
        # Their instruments by labels, without the library's look-up.
        self._runs_of, self._waited_of = cache(self.runs.labels), cache(self.waited.labels)
        self._ran_of, self._slack_of = cache(self.ran.labels), cache(self.slack.labels)
        self.jobs = counter(
            "headrace_program_jobs",
            "Jobs by how they ended: done, left, or the code of an error.",
            ["model_name", "outcome"],
        )
        self.job = histogram(
            "headrace_program_job_seconds", "From a job's request to its answer.", ["model_name"]
        )
        self.frames = counter(
            "headrace_camera_frames",
            "Frames of cameras by what became of them: run, still, dropped for a newer one, or the "
            "code of an error.",
            ["model_name", "outcome"],
        )
        self.age = histogram(
            "headrace_camera_age_seconds", "Age of a frame at its answer.", ["model_name"]
        )
        self.losses = counter(
            "headrace_camera_losses", "Times that a camera sent nothing.", ["model_name"]
        )
        self.cameras = Gauge("headrace_cameras", "Open cameras.", registry=self.registry)
        self._tests = counter(
            "headrace_program_tests",
            "Self-tests of programs, and scrubs of their bytes, by how they ended.",
            ["model_name", "kind", "outcome"],
        )
        self.registry.register(self)

    def ended(
        self, name: str, outcome: str, waited: float, seconds: float, slack: float | None
    ) -> None:
        """Count a run's end: it waited and ran, and was in time by `slack`."""
        self._runs_of(name, outcome).inc()
        self._waited_of(name).observe(waited)
        if seconds:
            self._ran_of(name).observe(seconds)
        if slack is not None:
            self._slack_of(name).observe(slack)

    def guarded(self, name: str, kind: str, outcome: str) -> None:
        """Count a test or a scrub of a program."""
        self._tests.labels(name, kind, outcome).inc()

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        executor = engine.executor
        for name, words, value in (
            ("waiting", "Runs that wait for a lane.", len(executor.queue)),
            ("running", "Runs on a lane.", executor.running),
            ("streams", "Admitted periodic streams.", len(engine.streams)),
            ("sequences", "Sequences whose states are kept.", len(engine.sequences)),
        ):
            yield GaugeMetricFamily(f"headrace_programs_{name}", words, value=value)
        lanes = GaugeMetricFamily(
            "headrace_programs_utilisation", "Share of a lane that streams take.", labels=["lane"]
        )
        for lane in range(executor.lanes.count):
            lanes.add_metric([str(lane)], executor.lanes.utilisation(lane))
        yield lanes
        for name, words, read in (
            ("worst_seconds", "Longest run of late.", lambda one: one.prices.longest),
            ("ready", "1 while its process serves.", lambda one: float(one.ready)),
            ("mode", "0: normal, 1: degraded, 2: safe.", lambda one: float(one.guard.mode)),
            ("restarts", "Processes begun after the first.", lambda one: one.restarts),
        ):
            family = GaugeMetricFamily(f"headrace_program_{name}", words, labels=["model_name"])
            for program in engine.programs.values():
                family.add_metric([program.name], read(program))
            yield family
