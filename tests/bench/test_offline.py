"""Throughput and latency of an engine in this process: the record of a run without HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.config import EngineOptions
from headrace.base.errors import InvalidRequest
from headrace.bench.compare import check_alike
from headrace.bench.history import History
from headrace.bench.offline import OfflineBench
from headrace.bench.options import RunOptions
from headrace.bench.report import html_report
from headrace.bench.result import read_result
from headrace.cli.bench import command
from tiny import talker
from tiny.kept import Kept


@pytest.fixture(scope="module")
def model(kept: Kept) -> Path:
    return kept(talker.make)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these runs goes into the user's own history."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def options(model: Path, **more: object) -> RunOptions:
    given = {"input": "12", "output": "uniform:4:9", "requests": 6, "seed": 3, **more}
    return RunOptions(
        "in-process", str(model), "completions", tokenizer=str(model), concurrency=3, **given
    )


@pytest.mark.slow
def test_both_questions_of_one_engine(model: Path) -> None:
    engine = EngineOptions(str(model), device="cpu", max_context=128)
    seen = []
    with OfflineBench(engine, options(model)) as bench:
        whole, _ = bench.throughput(seen.append)
        batches, run = bench.latency(batch=3)
    assert len(seen) == 6
    for result in (whole, batches):
        assert (result["requests"], result["succeeded"], result["valid"]) == (6, 6, True)
        assert result["server"]["version"]
        assert html_report(result)
    # All requests are there at once; batches are not.
    assert len({record.planned_ns for record in seen}) == 1
    assert len({record.planned_ns for record in run.records}) == 2
    for record in [*seen, *run.records]:
        assert record.tokens == record.asked_tokens, "exactly as long as was asked"
        assert record.planned_ns < record.chunk_ns[0] <= record.chunk_ns[-1] <= record.end_ns
        assert record.prompt_tokens
    assert (whole["kind"], batches["kind"]) == ("offline throughput", "offline latency")
    with pytest.raises(InvalidRequest, match="kind"):
        check_alike([whole, batches])
    over_http = {name: value for name, value in whole.items() if name != "kind"}
    with pytest.raises(InvalidRequest, match="over HTTP"):
        check_alike([whole, over_http])


@pytest.mark.slow
def test_the_commands_keep_what_they_measure(model: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    engine = [str(model), "--device", "cpu", "--max-context", "128", "--input", "8"]
    for name in ("a", "b"):
        told = ["throughput", *engine, "--output", "6", "--requests", "8"]
        done = runner.invoke(command, [*told, "--out", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
    assert len((tmp_path / "a" / "requests.jsonl").read_text().splitlines()) == 8
    compared = runner.invoke(
        command, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--tolerance", "1000"]
    )
    assert compared.exit_code == 0, compared.output
    latency = ["latency", *engine, "--output", "4", "--batch", "2", "--iterations", "3", "--json"]
    done = runner.invoke(command, [*latency, "--out", str(tmp_path / "c")])
    assert done.exit_code == 0, done.output
    assert read_result(tmp_path / "c")["options"]["concurrency"] == 2
    assert json.loads(done.stdout.splitlines()[0])["kind"] == "offline latency"
    loads = [entry.load for entry in History().metric("output_throughput")]
    assert loads == ["offline throughput:8"] * 2 + ["offline latency:2"]


def test_what_an_offline_run_cannot_be(model: Path) -> None:
    engine = EngineOptions(str(model), device="cpu", max_context=128)
    for more in ({"workload": "embeddings"}, {"arrivals": "constant:1"}):
        wrong = options(model, **more)
        wrong.endpoint = None
        with pytest.raises(InvalidRequest):
            OfflineBench(engine, wrong)
