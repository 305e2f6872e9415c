"""MLPerf scenarios through the real LoadGen against the mock server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import InvalidRequest, OptionError
from headrace.bench import mlperf
from headrace.bench.client import judge
from headrace.bench.job import Target
from headrace.bench.lengths import Lengths
from headrace.bench.material import Material
from headrace.bench.mlperf import MlperfOptions, MlperfResult, run_mlperf
from headrace.bench.mlperf_accuracy import LogAgreement, compare_logs, read_log, rouge_l
from headrace.bench.mock import Behaviour, MockServer
from headrace.cli.bench import command

pytest.importorskip("mlperf_loadgen")


def run(
    tmp_path: Path, scenario: str, mode: str = "performance", behaviour: Behaviour | None = None
) -> MlperfResult:
    with MockServer(behaviour or Behaviour(ttft=0.02, itl=0.002)) as server:
        options = MlperfOptions(
            Target(server.url, "mock"),
            scenario,
            mode,
            8,
            Lengths("fixed", 16),
            Lengths("fixed", 12),
            min_seconds=1.0,
            qps=20,
            min_queries=8,
        )
        return run_mlperf(options, Material(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "line"),
    [
        ("SingleStream", "90.0th percentile latency (ns)"),
        ("MultiStream", "99.0th percentile latency (ns)"),
        ("Server", "Completed samples per second"),
        ("Offline", "Samples per second"),
    ],
)
def test_scenarios(tmp_path: Path, scenario: str, line: str) -> None:
    found = run(tmp_path, scenario)
    assert found.failures == []
    assert line in found.summary, found.summary
    assert found.folder == (
        tmp_path / "results" / "this" / "mock" / scenario / "performance" / "run_1"
    )
    assert (found.folder / "mlperf_log_detail.txt").is_file()
    assert found.summary["Result is"] == ("VALID" if found.valid else "INVALID")
    if scenario == "SingleStream":
        # 20 ms to the first token and 11 pauses of 2 ms.
        assert float(found.summary["Min latency (ns)"]) / 1e6 >= 42


@pytest.mark.slow
def test_accuracy_mode_logs_every_answer(tmp_path: Path) -> None:
    found = run(tmp_path, "Offline", "accuracy")
    assert found.valid is None
    logged = json.loads((found.folder / "mlperf_log_accuracy.json").read_text())
    assert sorted(entry["qsl_idx"] for entry in logged) == list(range(8))
    assert {bytes.fromhex(entry["data"]).decode() for entry in logged} == {" tok" * 12}


@pytest.mark.slow
def test_failures_are_told_beside_loadgens_verdict(tmp_path: Path) -> None:
    found = run(tmp_path, "Offline", behaviour=Behaviour(ttft=0.005, itl=0, error_rate=0.3))
    assert 0 < len(found.failures) < found.requests
    assert "as was set" in found.failures[0]


@pytest.mark.slow
def test_a_client_that_is_late_is_told_beside_loadgens_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer holds up the loop that stamps all others for 40 ms."""

    def slow(*given: Any) -> None:
        time.sleep(0.04)
        judge(*given)

    monkeypatch.setattr(mlperf, "judge", slow)
    found = run(tmp_path, "Offline")
    assert found.failures == []
    assert "client_lag" in {one.code for one in found.findings if one.severity == "invalid"}


@pytest.mark.slow
def test_offline_lasts_without_being_told_a_rate(tmp_path: Path) -> None:
    with MockServer(Behaviour(ttft=0.1, itl=0.001, at_once=4)) as server:
        options = MlperfOptions(
            Target(server.url, "mock"),
            "Offline",
            "performance",
            16,
            Lengths("fixed", 8),
            Lengths("fixed", 4),
            min_seconds=6.0,  # The pass takes 0.4 s where nothing else runs.
        )
        found = run_mlperf(options, Material(), tmp_path)
    assert found.requests > 16, "more than the one pass that told the rate"


def test_a_scenario_is_checked_before_the_server_is_asked() -> None:
    done = CliRunner().invoke(command, ["mlperf", "Foo", "--url", "http://127.0.0.1:9"])
    assert isinstance(done.exception, InvalidRequest)
    assert "Offline" in done.exception.message


def test_bad_options(tmp_path: Path) -> None:
    target = Target("http://127.0.0.1:9", "m")
    for options in (
        MlperfOptions(target, "Online"),
        MlperfOptions(target, mode="speed"),
        MlperfOptions(target, qps=0),
        MlperfOptions(target, ttft="2000"),
        MlperfOptions(target, ttft="soon"),
        MlperfOptions(target, tpot="0"),
    ):
        with pytest.raises((InvalidRequest, OptionError)):
            run_mlperf(options, Material(), tmp_path)


def log(folder: Path, *answers: str) -> Path:
    folder.mkdir()
    entries = [{"qsl_idx": n, "data": text.encode().hex()} for n, text in enumerate(answers)]
    (folder / "mlperf_log_accuracy.json").write_text(json.dumps(entries))
    return folder


def test_accuracy_logs_are_compared(tmp_path: Path) -> None:
    assert rouge_l("a b c d", "a c d e") == pytest.approx(0.75)
    assert rouge_l("", "") == 1
    assert rouge_l("", "a") == 0
    ours, theirs = log(tmp_path / "a", "a b c d", "x y"), log(tmp_path / "b", "a c d e", "x y")
    assert compare_logs(ours, theirs) == LogAgreement(2, 1, 0.875)
    with pytest.raises(InvalidRequest, match="not the same library"):
        compare_logs(ours, log(tmp_path / "c", "a"))
    with pytest.raises(InvalidRequest, match="no accuracy log"):
        read_log(tmp_path / "none")
    half = log(tmp_path / "d", "a")
    whole = (half / "mlperf_log_accuracy.json").read_text()
    (half / "mlperf_log_accuracy.json").write_text(whole[:20])
    with pytest.raises(InvalidRequest, match="no accuracy log"):
        read_log(half)
    with pytest.raises(InvalidRequest, match="holds no answer"):
        read_log(log(tmp_path / "e"))


@pytest.mark.slow
def test_the_command_tells_what_loadgen_judged(tmp_path: Path) -> None:
    runner = CliRunner()
    common = ["--samples", "8", "--input", "8", "--output", "6", "--out", str(tmp_path)]
    with MockServer(Behaviour(ttft=0.005, itl=0.001)) as server:
        common += ["--url", server.url]
        short = runner.invoke(
            command, ["mlperf", "Offline", "--seconds", "1", "--qps", "20", *common]
        )
        assert "a submission needs 600 s" in short.output
        summary = tmp_path / "results/this/mock/Offline/performance/run_1/mlperf_log_summary.txt"
        assert summary.read_text() in short.output
        reference = log(tmp_path / "r", *[" tok" * 6] * 8)
        told = ["mlperf", "Offline", "--mode", "accuracy", "--reference", str(reference), *common]
        equal = runner.invoke(command, told)
        assert equal.exit_code == 0, equal.output
        assert "8 of 8 answers equal" in equal.output
        worse = log(tmp_path / "w", *[" tok" * 5 + " x"] * 8)
        told[told.index(str(reference))] = str(worse)
        assert runner.invoke(command, told).exit_code == 3
        told[told.index("accuracy")], told[told.index(str(worse))] = "both", str(reference)
        both = runner.invoke(command, [*told, "--seconds", "1", "--qps", "20"])
        assert "8 of 8 answers equal" in both.output
        assert both.output.count("logs: ") == 2
        assert summary.read_text() in both.output
    refused = runner.invoke(command, ["mlperf", "Offline", "--reference", str(worse), *common])
    assert isinstance(refused.exception, InvalidRequest)
