"""The harness against a server whose behaviour is set: the report must find what was set."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import InvalidRequest, Overloaded
from headrace.bench.crosscheck import cross_check, means, parse_metrics
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import RunOptions
from headrace.bench.record import RequestRecord
from headrace.bench.result import read_result
from headrace.bench.run import Outcome, run_bench
from headrace.bench.store import read_records, records_csv


def bench(behaviour: Behaviour, folder: Path | None = None, **changes: Any) -> Outcome:
    values: dict[str, Any] = {"requests": 24, "input": "20", "output": "16", "concurrency": 6}
    with MockServer(behaviour) as server:
        return run_bench(RunOptions(url=server.url, **{**values, **changes}), folder)


def quiet_bench(behaviour: Behaviour, **changes: Any) -> Outcome:
    """A run that the bench itself calls valid: on a starved machine there is nothing to time."""
    for _ in range(3):
        outcome = bench(behaviour, **changes)
        if outcome.result["valid"]:
            return outcome
    pytest.skip("this machine is too busy: the bench found its own client late three times")


def codes(outcome: Outcome) -> set[str]:
    return {finding["code"] for finding in outcome.result["findings"]}


def p50(outcome: Outcome, name: str) -> float:
    return float(outcome.result["samples"][name]["percentiles"]["p50"])


@pytest.mark.parametrize("arrivals", [None, "poisson:20"])
def test_latencies_are_found(arrivals: str | None) -> None:
    """A server that sleeps is never early. How late it is belongs to the machine: the rest of what
    is found is held against its own parts."""
    outcome = bench(Behaviour(ttft=0.12, itl=0.03), arrivals=arrivals)
    early = 1e-3  # Two clocks.
    assert p50(outcome, "ttft") >= 0.12 - early
    assert p50(outcome, "e2e") >= 0.12 + 15 * 0.03 - early
    # Pieces that one read brought have no pause between them: the mean is held, not the median.
    pauses = [b - a for r in outcome.run.records for a, b in itertools.pairwise(r.chunk_ns)]
    told = outcome.result["samples"]["itl"]["mean"]
    assert told == pytest.approx(sum(pauses) / len(pauses) / 1e9, abs=1e-6)
    mean = {name: outcome.result["samples"][name]["mean"] for name in ("ttft", "tpot", "e2e")}
    assert mean["e2e"] >= mean["ttft"] + 15 * mean["tpot"] - early
    assert mean["e2e"] <= outcome.result["seconds"]
    figures = outcome.result["figures"]
    assert figures["failure_rate"]["value"] == 0
    assert figures["output_throughput"]["value"] == pytest.approx(
        24 * 16 / outcome.result["seconds"]
    )
    assert outcome.result["samples"]["input_tokens"]["mean"] == 20
    assert outcome.result["samples"]["output_tokens"]["mean"] == 16
    busy = sum(record.end_ns - record.sent_ns for record in outcome.run.records) / 1e9
    concurrency = figures["concurrency"]["value"]
    assert concurrency == pytest.approx(busy / outcome.result["seconds"])
    if arrivals is None:
        assert concurrency <= 6.001


@pytest.mark.slow
def test_failures_are_failures() -> None:
    outcome = bench(Behaviour(ttft=0.01, itl=0.001, error_rate=0.4, seed=3), requests=50, warmup=0)
    rate = outcome.result["figures"]["failure_rate"]["value"]
    assert 0.2 < rate < 0.6
    assert outcome.result["succeeded"] == outcome.result["requests"] - round(rate * 50)
    assert "failed_server" in codes(outcome)
    failed = [record for record in outcome.run.records if record.error]
    assert all(record.status == 500 and "as was set" in (record.error or "") for record in failed)
    # What failed adds nothing to the throughput.
    tokens = outcome.result["succeeded"] * 16
    assert outcome.result["figures"]["output_throughput"]["value"] == pytest.approx(
        tokens / outcome.result["seconds"]
    )


@pytest.mark.slow
def test_overload_is_told_from_faults() -> None:
    outcome = bench(Behaviour(ttft=0.01, itl=0, error_rate=0.5, error_status=503), warmup=0)
    assert "failed_overload" in codes(outcome)


def test_cut_off_answers_are_failures() -> None:
    outcome = bench(Behaviour(ttft=0.01, itl=0.002, drop_rate=0.5, seed=1), warmup=0)
    assert "failed_connection" in codes(outcome)
    cut = next(record for record in outcome.run.records if record.error)
    assert "in the middle of an answer" in (cut.error or "")


@pytest.mark.slow
def test_a_stalled_stream_is_a_failure() -> None:
    outcome = bench(
        Behaviour(ttft=0.01, itl=0.002, stall_after=4, stall_seconds=3600),
        requests=4,
        stall=5.0,
        warmup=0,
    )
    assert outcome.result["figures"]["failure_rate"]["value"] == 1
    assert codes(outcome) >= {"failed_stalled", "no_success"}
    assert not outcome.result["valid"]
    assert all(len(record.chunk_ns) == 4 for record in outcome.run.records)


@pytest.mark.slow
def test_a_standstill_that_recovers_is_found() -> None:
    outcome = bench(
        Behaviour(ttft=0.01, itl=0.002, stall_after=4, stall_seconds=1.3), requests=6, warmup=0
    )
    assert "standstill" in codes(outcome)
    assert outcome.result["figures"]["failure_rate"]["value"] == 0


@pytest.mark.slow
def test_a_timeout_is_a_failure() -> None:
    outcome = bench(Behaviour(ttft=3600), requests=2, timeout=0.4, warmup=0)
    assert "failed_timeout" in codes(outcome)
    assert all(0.3 < (r.end_ns - r.planned_ns) / 1e9 < 3600 for r in outcome.run.records)


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        (Behaviour(itl=0.002, claim=1.5), "claims_more"),
        (Behaviour(itl=0.002, claim=0.5), "short"),
        (Behaviour(itl=0.002, buffered=True), "buffered"),
        (Behaviour(itl=0.002, no_usage=True), "no_usage"),
    ],
)
def test_a_lying_server_is_found(behaviour: Behaviour, code: str) -> None:
    honest = quiet_bench(Behaviour(itl=0.02), warmup=0)
    assert code not in codes(honest)
    assert code in codes(bench(behaviour, warmup=0))


@pytest.mark.slow
def test_a_slow_client_makes_the_run_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    # The client process is given work of its own: its loop stands still every few milliseconds.
    from headrace.bench import fleet

    slow = (
        "import time, headrace.bench.client as c\n"
        "real = c.Stream.on_body\n"
        "def body(self, now, data):\n"
        "    time.sleep(0.03)\n"
        "    real(self, time.monotonic_ns(), data)\n"
        "c.Stream.on_body = body\n"
        "import headrace.bench.worker as w\n"
        "w.main()\n"
    )
    spawn = fleet.subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return spawn([command[0], "-c", slow], **options)

    monkeypatch.setattr(fleet.subprocess, "Popen", popen)
    outcome = bench(Behaviour(ttft=0.02, itl=0.01), warmup=0, requests=8)
    assert not outcome.result["valid"]
    assert "client_lag" in codes(outcome)


@pytest.mark.slow
def test_a_queue_before_the_server_counts() -> None:
    # Two at a time, each 0.3 s, but one arrives every 5 ms: waiting time belongs to TTFT.
    outcome = bench(
        Behaviour(ttft=0.2, itl=0.006, at_once=2), arrivals="constant:200", requests=40, warmup=0
    )
    ttft = outcome.result["samples"]["ttft"]
    assert ttft["percentiles"]["p50"] > 0.5
    assert "over_saturated" in codes(outcome)


@pytest.mark.slow
def test_requests_are_sent_on_time_while_the_server_stands_still() -> None:
    # Coordinated omission: a server that answers late must not slow the arrivals down.
    outcome = quiet_bench(
        Behaviour(ttft=1.0, itl=0), arrivals="constant:50", requests=50, warmup=0, output="2"
    )
    records = outcome.run.records
    planned = [(record.planned_ns - outcome.run.start_ns) / 1e9 for record in records]
    assert planned == pytest.approx([n / 50 for n in range(50)], abs=1e-6)
    late = sorted((record.sent_ns - record.planned_ns) / 1e9 for record in records)
    # One after the other they would take fifty seconds.
    assert late[len(late) // 2] < 0.5
    assert outcome.result["seconds"] < 25


@pytest.mark.slow
def test_chat_sends_the_history_and_cancels() -> None:
    # So slow that no answer comes in one piece, which nobody could cancel.
    with MockServer(Behaviour(ttft=0.005, itl=0.01)) as server:
        run_bench(
            RunOptions(
                url=server.url,
                workload="chat",
                requests=3,
                turns=3,
                think_seconds=0.01,
                prefix_tokens=10,
                input="5",
                output="4",
                warmup=0,
            )
        )
        lengths = sorted(len(body["messages"]) for body in server.seen.bodies)
        assert lengths == [2, 2, 2, 4, 4, 4, 6, 6, 6]
        outcome = run_bench(
            RunOptions(
                url=server.url,
                workload="agentic",
                requests=12,
                turns=3,
                prefix_tokens=10,
                input="5",
                output="40",
                warmup=0,
                seed=2,
            )
        )
    cancelled = [record for record in outcome.run.records if record.cancelled]
    assert cancelled
    assert outcome.result["figures"]["cancelled"]["value"] == len(cancelled)
    assert outcome.result["figures"]["failure_rate"]["value"] == 0


def test_prefix_hits_are_reported_beside_what_was_possible() -> None:
    outcome = bench(
        Behaviour(ttft=0.005, itl=0.001, prefix_cache=True),
        workload="shared-prefix",
        groups=2,
        prefix_tokens=64,
        input="16",
        concurrency=1,
        warmup=0,
    )
    figures = outcome.result["figures"]
    possible = 22 * 64 / (24 * 80)
    assert figures["possible_hit_rate"]["value"] == pytest.approx(possible)
    assert figures["prefix_hit_rate"]["value"] == pytest.approx(possible, abs=0.02)


def test_hits_on_prompts_of_an_earlier_run_are_named() -> None:
    with MockServer(Behaviour(ttft=0.005, itl=0.001, prefix_cache=True)) as server:
        options = RunOptions(url=server.url, requests=12, output="4", input="64", warmup=0)
        first, second = (run_bench(options) for _ in range(2))
    assert "stale_hits" not in codes(first)
    assert "stale_hits" in codes(second)


@pytest.mark.slow
def test_several_processes_share_the_work() -> None:
    outcome = bench(Behaviour(ttft=0.02, itl=0.002), processes=2, requests=30, concurrency=5)
    assert {record.process for record in outcome.run.records} == {0, 1}
    assert len({record.number for record in outcome.run.records}) == 30
    assert outcome.result["figures"]["concurrency"]["value"] <= 5.01


@pytest.mark.slow
def test_duration_ends_a_run() -> None:
    outcome = quiet_bench(Behaviour(ttft=0.05, itl=0.001), requests=10_000, duration=1.0, warmup=0)
    assert outcome.result["seconds"] > 0.9
    assert len(outcome.run.records) < 200


@pytest.mark.slow
def test_without_streaming() -> None:
    outcome = bench(Behaviour(ttft=0.05, itl=0.004), stream=False, output="200")
    # Nobody saw when the first token came.
    assert not {"ttft", "itl", "tpot"} & set(outcome.result["samples"])
    assert outcome.result["samples"]["output_tokens"]["mean"] == 200


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    outcome = bench(Behaviour(ttft=0.005, itl=0.001), tmp_path / "run", api_key="secret")
    assert outcome.problem is None
    assert read_result(tmp_path / "run")["schema"] == "headrace.bench.run/1"
    records = read_records(tmp_path / "run" / "requests.jsonl")
    assert len(records) == 24
    assert "secret" not in (tmp_path / "run" / "result.json").read_text()
    lines = records_csv(records, outcome.run.start_ns).splitlines()
    assert len(lines) == 25
    assert lines[0].startswith("number,session,turn")


def test_half_written_results_are_named(tmp_path: Path) -> None:
    whole = tmp_path / "result.json"
    whole.write_text('{"schema": "headrace.bench.run/1", "requests": 2')
    with pytest.raises(InvalidRequest, match=r"not whole JSON [^;]*$"):
        read_result(tmp_path)
    (tmp_path / "requests.jsonl").touch()
    with pytest.raises(InvalidRequest, match=r"requests\.jsonl"):
        read_result(tmp_path)
    whole.write_text(json.dumps({"schema": "another/3"}))
    with pytest.raises(InvalidRequest, match="another/3"):
        read_result(tmp_path)
    half = tmp_path / "requests.jsonl"
    half.write_bytes(
        b'{"number":1,"session":1,"turn":0,"group":0,"planned_ns":5}\n{"number":2,"sess'
    )
    assert [record.number for record in read_records(half)] == [1]


def test_a_full_disk_keeps_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "requests.jsonl").symlink_to("/dev/full")
    outcome = bench(Behaviour(ttft=0.005, itl=0.001), folder)
    assert outcome.problem is not None
    assert "No space left" in outcome.problem
    assert outcome.result["succeeded"] == 24


def test_a_server_that_is_down() -> None:
    with pytest.raises(Overloaded, match="no server to measure"):
        run_bench(RunOptions(url="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"workload": "nonsense"}, "workload"),
        ({"trace": "parquet:x"}, "trace"),
        ({"concurrency": 0}, "concurrency"),
        ({"slo": "ttft:p99<0ms"}, "slo"),
        ({"slo": "speed<3s"}, "slo"),
        ({"arrivals": "trace"}, "arrivals"),
        ({"duration": 0.0}, "duration"),
        ({"endpoint": "grpc"}, "endpoint"),
        ({"workload": "chat", "endpoint": "completions"}, "endpoint"),
        ({"url": "ftp://x"}, "url"),
        ({"input": "many"}, "input"),
    ],
)
def test_bad_options_are_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        run_bench(RunOptions(**{"url": "http://127.0.0.1:9", **change}))
    assert error.value.param == param


def test_the_servers_histograms_are_read() -> None:
    text = (
        "# HELP vllm:time_to_first_token_seconds x\n"
        'vllm:time_to_first_token_seconds_bucket{le="1"} 4\n'
        'vllm:time_to_first_token_seconds_sum{model_name="a b"} 2.5\n'
        'vllm:time_to_first_token_seconds_count{model_name="a b"} 10\n'
        "e2e_request_latency_seconds_sum 1e1\ne2e_request_latency_seconds_count 20\n"
    )
    before = parse_metrics(text)
    assert before == {"ttft": (2.5, 10), "e2e": (10, 20)}
    told = means(before, {"ttft": (4.5, 20), "e2e": (10, 20)})
    assert told == {"ttft": {"mean": pytest.approx(0.2), "count": 10}}
    records = [
        RequestRecord(n, n, 0, 0, 0, 0, [200_000_000, 300_000_000], 300_000_000) for n in range(10)
    ]
    table, findings = cross_check(told, records)
    assert table["ttft"] == pytest.approx({"server": 0.2, "client": 0.2})
    assert not findings
    _, findings = cross_check({"ttft": {"mean": 0.05, "count": 10}}, records)
    assert [finding.code for finding in findings] == ["disagree_ttft"]


@pytest.mark.slow
def test_a_server_that_loads_is_waited_for() -> None:
    with MockServer(Behaviour(not_ready=1.0)) as server:
        options = RunOptions(url=server.url, requests=2, output="2", input="2", warmup=0)
        assert run_bench(options).result["succeeded"] == 2
    with (
        MockServer(Behaviour(not_ready=60)) as server,
        pytest.raises(Overloaded, match="not ready"),
    ):
        run_bench(RunOptions(url=server.url, wait=0.6))
