"""The server and its machine over a run: series that are read, bounded, kept and drawn."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from headrace.base.process import Processes
from headrace.bench.energy import EnergyMeter
from headrace.bench.http import parse_url
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import RunOptions
from headrace.bench.report import html_report, telemetry_charts
from headrace.bench.result import read_result
from headrace.bench.run import run_bench
from headrace.bench.telemetry import (
    MOST_POINTS,
    MOST_SERIES,
    MetricValue,
    SeriesWriter,
    probes_of,
    rates,
    read_text,
    scrape,
)

TEXT = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3
vllm:num_requests_running{engine="1",model_name="m"} 4
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{finish="a"} 10
vllm:generation_tokens_total{finish="b"} 5
# TYPE num_requests_running gauge
num_requests_running{engine="0",model_name="m"} 3
num_requests_running{engine="1",model_name="m"} 4
# TYPE t histogram
t_bucket{le="+Inf"} 1
t_sum 1
t_count 1
"""


def test_a_text_is_read_by_its_types() -> None:
    assert read_text(TEXT, "server") == {
        'server vllm:num_requests_running{engine="0"}': MetricValue(3.0, ""),
        'server vllm:num_requests_running{engine="1"}': MetricValue(4.0, ""),
        "server vllm:generation_tokens": MetricValue(15.0, "", True),
    }


def test_a_counter_is_a_rate_and_a_restart_is_none() -> None:
    second = 1_000_000_000
    assert rates([(0, 5.0), (2 * second, 15.0), (3 * second, 2.0), (4 * second, 3.0)]) == [
        (2 * second, 5.0),
        (4 * second, 1.0),
    ]


def test_series_are_bounded_and_reach_over_the_whole_run() -> None:
    recorder = SeriesWriter()
    for at in range(3000):
        recorder.add([(at * 10**9, {"GPU 0 power": MetricValue(float(at), "W")})])
    recorder.add([(3000 * 10**9, {"GPU 0 power": MetricValue(3000.0, "W")})], last=True)
    found = recorder.document(0, 1.0)["series"]["GPU 0 power"]
    assert MOST_POINTS / 2 <= len(found["seconds"]) <= MOST_POINTS
    assert (found["seconds"][0], found["seconds"][-1]) == (0.0, 3000.0)
    many = SeriesWriter()
    many.add([(0, {f"GPU {n} power": MetricValue(1.0, "W") for n in range(MOST_SERIES + 5)})])
    document = many.document(0, 1.0)
    assert len(document["series"]) == MOST_SERIES
    assert len(document["left_out"]) == 5, "and they are named"


def test_what_never_changes_says_nothing_unless_it_is_known() -> None:
    recorder = SeriesWriter()
    for at in (1, 2):
        told = {
            "server x": MetricValue(7.0, ""),
            "server vllm:num_requests_running": MetricValue(0.0, ""),
        }
        recorder.add([(at, told)])
    assert list(recorder.document(0, 1.0)["series"]) == ["server vllm:num_requests_running"]


def test_a_run_keeps_and_draws_its_series(tmp_path: Path) -> None:
    with MockServer(Behaviour(ttft=0.02, itl=0.004)) as server:
        options = RunOptions(
            server.url,
            requests=24,
            concurrency=4,
            input="4",
            output="12",
            warmup=0,
            metrics_interval=0.02,
            metrics_urls=[server.url],
        )
        run_bench(options, tmp_path)
    result = read_result(tmp_path)
    series = result["telemetry"]["series"]
    running = series["server vllm:num_requests_running"]
    # The first look and the last are before and after the load; more are the machine's to give.
    assert all(0 <= value <= 4 for value in running["values"])
    assert all(second >= 0 for second in running["seconds"])
    assert series["server mock_requests"]["unit"] == "/s"
    assert max(series["server mock_requests"]["values"]) > 0
    other = f"127.0.0.1:{server.port} mock_requests"
    assert other in series, "a further exporter has a name of its own"
    if Path("/proc/self/statm").exists():
        # The mock is a thread of this process.
        assert series["server's processes memory"]["values"][-1] > 1e6
    assert "Server and machine over the run" in html_report(result)
    told = (
        "server vllm:num_requests_running",
        'server vllm:num_requests_waiting{engine="0"}',
        "GPU 12 memory",
        "package-0 power",
        "server something_else",
    )
    result["telemetry"]["series"] = {
        name: {"unit": "", "seconds": [0.0, 1.0], "values": [2.0, 3.0]} for name in told
    }
    charts = {chart.title: chart for chart in telemetry_charts(result)}
    assert list(charts) == ["Server: requests", "GPU memory", "Power"]
    assert len(charts["Server: requests"].series) == 2
    assert list(charts["GPU memory"].series[0].ys) == pytest.approx([2e-9, 3e-9])
    assert "something_else" in html_report(result), "what has no chart is in the table"


def test_without_an_interval_nothing_is_read(tmp_path: Path) -> None:
    with MockServer(Behaviour(ttft=0.001, itl=0)) as server:
        options = RunOptions(server.url, requests=2, input="4", output="2", metrics_interval=0)
        assert run_bench(options, tmp_path).result["telemetry"] is None
    assert telemetry_charts(read_result(tmp_path)) == []


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux's /proc")
def test_the_processes_behind_a_port() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert Processes.listening_on(port).roots == (os.getpid(),)
    used = Processes((os.getpid(),)).used()
    assert used is not None
    assert used.resident_bytes > 1e6
    assert Processes(()).used() is None
    assert Processes.listening_on(port).roots == (), "nobody listens there any more"


def test_a_server_elsewhere_has_none_of_this_machines_counters() -> None:
    assert len(probes_of("http://127.0.0.1:1")) == 2
    assert len(probes_of("http://example.org:1")) == 1
    assert EnergyMeter(local=False).joules() is None
    assert scrape(parse_url("http://127.0.0.1:9"), "/metrics", "server", {}) == {}
