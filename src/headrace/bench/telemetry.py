"""Activity of a server and its machine over a run, as series next to the requests' timeline.

Sampled from outside: the server's Prometheus text. If the server is on this machine, also its
processes (CPU, memory), the package's energy counters (RAPL) and the GPUs (NVML). An unreadable
source is absent, never guessed.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from ..base.process import Processes, busy_cores
from ..obs.threads import THREADS
from .energy import gpu_states, rapl_joules
from .http import Address, ConnectionLost, fetch, parse_url

MOST_POINTS = 600
"""Most points of a series; above this, every second one is dropped and the interval doubles."""
MOST_SERIES = 96
"""Most series of one run; a server may have thousands."""
SCRAPE_SECONDS = 5.0
KNOWN = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "generation_tokens",
    "prompt_tokens",
)
"""Names (vLLM's, without prefix) that are kept even if they never change."""


class MetricValue(NamedTuple):
    """One reading."""

    value: float
    unit: str
    counter: bool = False
    """Whether it only grows, so that its rate is kept."""


Readings = dict[str, MetricValue]
Probe = Callable[[], Readings]


class SeriesWriter:
    """Writer of series from readings, bounded in number and length."""

    def __init__(self) -> None:
        self._times: dict[str, list[int]] = defaultdict(list)
        self._values: dict[str, list[MetricValue]] = defaultdict(list)
        self._stride = 1
        self._count = 0
        self._left_out: set[str] = set()

    def add(self, rounds: Sequence[tuple[int, Readings]], *, last: bool = False) -> None:
        """Keep the readings of all probes, each with its time; the `last` despite the stride."""
        self._count += 1
        if (self._count - 1) % self._stride and not last:
            return
        for at_ns, readings in rounds:
            for name, value in readings.items():
                if name not in self._values and len(self._values) >= MOST_SERIES:
                    self._left_out.add(name)
                    continue
                self._times[name].append(at_ns)
                self._values[name].append(value)
        if max(map(len, self._times.values()), default=0) > MOST_POINTS:
            self._stride *= 2
            for name in self._times:
                self._times[name] = self._times[name][::2]
                self._values[name] = self._values[name][::2]

    def document(self, start_ns: int, interval: float) -> dict[str, Any]:
        """Return seconds from `start_ns` and values of each series that varies or is known."""
        series = {}
        for name, times in self._times.items():
            values = self._values[name]
            points = [(t, v.value) for t, v in zip(times, values, strict=True)]
            unit = values[0].unit
            if values[0].counter:
                points, unit = rates(points), f"{unit}/s"
            points = [point for point in points if point[0] >= start_ns]
            known = not name.startswith("server ") or any(word in name for word in KNOWN)
            if points and (known or len({value for _, value in points}) > 1):
                series[name] = {
                    "unit": {"J/s": "W", "core s/s": "cores"}.get(unit, unit),
                    "seconds": [(at - start_ns) / 1e9 for at, _ in points],
                    "values": [value for _, value in points],
                }
        return {
            "interval": interval * self._stride,
            "series": series,
            "left_out": sorted(self._left_out),
        }


def rates(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return a counter's growth per second between readings, without restarts (when it shrinks)."""
    found = []
    for (before, earlier), (at, value) in itertools.pairwise(points):
        if at > before and value >= earlier:
            found.append((at, (value - earlier) / (at - before) * 1e9))
    return found


class Telemetry:
    """Reader of all probes in its own thread, until stopped."""

    def __init__(self, probes: Sequence[Probe], interval: float) -> None:
        self.interval = interval
        self._probes = probes
        self._writer = SeriesWriter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Telemetry:
        if self._probes:
            self._read()
            self._thread = THREADS.keep("telemetry", self._run)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._read(last=True)

    def document(self, start_ns: int) -> dict[str, Any] | None:
        """Return the series; None without any probe."""
        return self._writer.document(start_ns, self.interval) if self._probes else None

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self.interval, time.monotonic())
            if self._stop.wait(due - time.monotonic()):
                return
            self._read()

    def _read(self, *, last: bool = False) -> None:
        rounds = []
        for probe in self._probes:
            begin = time.monotonic_ns()
            readings = probe()
            rounds.append(((begin + time.monotonic_ns()) // 2, readings))
        self._writer.add(rounds, last=last)


def probes_of(url: str, more: Iterable[str] = (), api_key: str | None = None) -> list[Probe]:
    """Make probes of a server, of further exporters (DCGM, node), and of this machine if it runs
    the server."""
    address = parse_url(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    found: list[Probe] = [lambda: scrape(address, "/metrics", "server", headers)]
    for other in more:
        place = parse_url(other)
        path = "" if place.path else "/metrics"
        found.append(lambda place=place, path=path: scrape(place, path, place.authority, {}))  # type: ignore[misc]
    if address.local:
        found.append(local_probe(Processes.listening_on(address.port)))
    return found


def local_probe(processes: Processes) -> Probe:
    """Make a probe of this machine and the processes that serve."""

    def read() -> Readings:
        found: Readings = {}
        if (busy := busy_cores()) is not None:
            found["machine CPU"] = MetricValue(busy, "core s", True)
        if (used := processes.used()) is not None:
            found["server's processes CPU"] = MetricValue(used.cpu_seconds, "core s", True)
            found["server's processes memory"] = MetricValue(used.resident_bytes, "B")
        for name, (joules, _) in rapl_joules().items():
            found[f"{name} power"] = MetricValue(joules, "J", True)
        for index, state in gpu_states().items():
            found |= {f"GPU {index} {name}": MetricValue(*read) for name, read in state.items()}
        return found

    return read


def scrape(address: Address, path: str, source: str, headers: dict[str, str]) -> Readings:
    """Read gauges and counters of a Prometheus text; empty on failure."""
    try:
        status, body = asyncio.run(fetch(address, "GET", path, b"", headers, SCRAPE_SECONDS))
        return read_text(body.decode(errors="replace"), source) if status == 200 else {}
    except (ConnectionLost, OSError, ValueError):
        return {}


def read_text(text: str, source: str) -> Readings:
    """Sum counters over their labels; separate gauges by the labels in which they differ."""
    found: Readings = {}
    for family in text_string_to_metric_families(text):
        if family.type == "counter":
            total = sum(s.value for s in family.samples if not s.name.endswith("_created"))
            found[f"{source} {family.name}"] = MetricValue(total, "", True)
        elif family.type in ("gauge", "unknown"):
            labels = [set(sample.labels.items()) for sample in family.samples]
            common = set.intersection(*labels) if labels else set()
            for sample, own in zip(family.samples, labels, strict=True):
                shown = ",".join(f'{key}="{value}"' for key, value in sorted(own - common))
                name = f"{source} {sample.name}" + (f"{{{shown}}}" if shown else "")
                found[name] = MetricValue(sample.value, "")
    # A series under vLLM's name and without its prefix is one series.
    return {name: value for name, value in found.items() if _prefixed(name, source) not in found}


def _prefixed(name: str, source: str) -> str:
    return f"{source} vllm:{name.removeprefix(f'{source} ')}"
