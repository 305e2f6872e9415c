"""The gate of a load: a point whose answers are not as right as the reference's is marked."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from headrace.base.errors import InvalidRequest
from headrace.bench.checking import AccuracyGate, said
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import RunOptions
from headrace.bench.reference import Answer, Reference, save_reference
from headrace.bench.sweep import Sweeper, read_points, sweep_charts
from headrace.cli.bench import command


def reference(path: Path, score: float) -> Path:
    """One of four sums; the mock answers all of them wrongly."""
    save_reference(path, Reference("m", ["a"], [Answer(["x"], [])], None, {"arithmetic/4": score}))
    return path


def test_a_point_below_the_gate_is_marked_and_fails_the_sweep(tmp_path: Path) -> None:
    good, bad = reference(tmp_path / "good", 0.0), reference(tmp_path / "bad", 0.5)
    runner, out = CliRunner(), tmp_path / "sweep"
    common = ["--requests", "16", "--input", "4", "--output", "4", "--no-history", "--gate"]
    with MockServer(Behaviour(ttft=0.005, itl=0.001)) as server:
        told = ["sweep", "1,2", "--url", server.url, *common, "tasks", "--out", str(out)]
        done = runner.invoke(command, [*told, "--accuracy-gate", str(bad)])
        assert done.exit_code == 3, done.output
        assert done.output.count("FAILED: arithmetic has 0.0% of the reference's") == 2
        asked = server.seen.requests
        again = runner.invoke(command, [*told, "--accuracy-gate", str(bad)])
        assert (again.exit_code, server.seen.requests) == (3, asked), "the verdict was kept"
        passed = runner.invoke(command, [*told, "--accuracy-gate", str(good)])
        assert passed.exit_code == 0, passed.output
        assert server.seen.requests == asked + 8, "another reference is asked for anew"
        single = ["run", "--url", server.url, *common, "tasks", "--out", str(tmp_path / "run")]
        one = runner.invoke(command, [*single, "--accuracy-gate", str(bad)])
        # 4 where this machine was too busy to be a client: then that is said first.
        assert one.exit_code in (3, 4), one.output
        assert "FAILED" in (tmp_path / "run" / "report.html").read_text()
        assert json.loads((tmp_path / "run" / "result.json").read_text())["accuracy"]["held"]


def test_points_that_fail_are_in_no_front_and_keep_no_slo(tmp_path: Path) -> None:
    gate = AccuracyGate.read(reference(tmp_path / "bad", 0.5), "tasks", 0.99)
    options = RunOptions(requests=8, input="4", output="4", slo="ttft:p50<60s", warmup=0)
    with MockServer(Behaviour(ttft=0.005, itl=0.001)) as server:
        options.url = server.url
        sweeper = Sweeper(options, "concurrency", tmp_path, seconds=None, gate=gate)
        points = list(sweeper.sweep([2]))
        points[0].result["valid"] = True  # However busy this machine is.
        assert not points[0].kept
        assert sweeper.search(lambda _point: None, start=2, limit=2) is None
    assert len(sweep_charts(points)[0].series[0].xs) == 0
    (tmp_path / "points.json").write_text(
        json.dumps([{"by": p.by, "value": p.value, "result": p.result} for p in points])
    )
    assert not read_points([tmp_path])[tmp_path.name][0].sound


def test_what_cannot_be_compared_fails(tmp_path: Path) -> None:
    """The mock tells no tokens of its answers."""
    gate = AccuracyGate.read(reference(tmp_path / "r", 0.0), "tokens", 0.99)
    with MockServer(Behaviour(ttft=0.001, itl=0)) as server:
        result = {"figures": {}, "server": {"model": "mock"}}
        told = gate.check(RunOptions(server.url), result)
    assert not told["passed"]
    assert "logprobs" in said(told)
    done = CliRunner().invoke(
        command, ["run", "--accuracy-gate", str(tmp_path / "r"), "--gate", "speed"]
    )
    assert isinstance(done.exception, InvalidRequest)
