"""Questions that the bench answers by itself: sweeps, searches, comparisons, history, exports."""

from __future__ import annotations

import io
import json
import math
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.base.version import revision
from headrace.bench.audit import Finding
from headrace.bench.compare import (
    Compared,
    compare_pairs,
    compare_single,
    interleave,
    regressed,
)
from headrace.bench.export import aiperf, vllm_bench
from headrace.bench.history import Entry, History, history_chart, remember, unit_of
from headrace.bench.identity import read_identity
from headrace.bench.metrics import Run, parse_slo
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import RunOptions
from headrace.bench.record import RequestRecord
from headrace.bench.report import html_report, result_charts
from headrace.bench.result import document
from headrace.bench.run import run_bench
from headrace.bench.statistics import describe, ratio_bootstrap, ratio_interval
from headrace.bench.sweep import Point, Sweeper, pareto, sweep_page
from headrace.cli import bench as cli_bench
from headrace.cli.bench import command


def record(number: int, ttft: float, itl: float, tokens: int, at: float = 0.0) -> RequestRecord:
    planned = int(at * 1e9)
    chunks = [planned + int((ttft + itl * n) * 1e9) for n in range(tokens)]
    return RequestRecord(
        number,
        number,
        0,
        0,
        planned,
        planned,
        chunks,
        chunks[-1],
        200,
        asked_tokens=tokens,
        prompt_tokens=10,
        output_tokens=tokens,
        characters=4 * tokens,
    )


def made(options: RunOptions, records: list[RequestRecord]) -> dict[str, Any]:
    run = Run(
        records, 0, max(r.end_ns for r in records), parse_slo(options.slo) if options.slo else None
    )
    return document(
        run=run,
        options=options.public(),
        server={"url": "x", "model": "m", "version": None},
        audits=[],
        findings=list[Finding](),
        interrupted=False,
    )


def model_of_a_server(options: RunOptions, _folder: Path | None) -> dict[str, Any]:
    """A server whose TTFT rises with the load: 50 ms up to 20 users (or requests/s), then more."""
    load = float(options.arrivals.split(":")[1]) if options.arrivals else options.concurrency
    ttft = 0.05 + max(0.0, load - 20) * 0.01
    return made(options, [record(n, ttft, 0.01, 8, n / 100) for n in range(40)])


def test_the_search_finds_the_largest_load() -> None:
    # TTFT passes 200 ms at a load of 35.
    base = RunOptions(slo="ttft:p99<200ms")
    for by, expected, slack in (("concurrency", 35, 2), ("rate", 35, 2)):
        seen: list[Point] = []
        sweeper = Sweeper(base, by, None, run=model_of_a_server)
        best = sweeper.search(seen.append, start=1, limit=4096)
        assert best is not None
        assert expected - slack <= best.value <= expected
        assert len(seen) <= 14
    assert (
        Sweeper(replace(base, slo="ttft:p99<10ms"), "rate", None, run=model_of_a_server).search(
            seen.append, start=1, limit=64
        )
        is None
    )
    top = Sweeper(base, "rate", None, run=model_of_a_server).search(seen.append, start=1, limit=16)
    assert top is not None
    assert top.value == 16
    with pytest.raises(InvalidRequest, match="slo"):
        Sweeper(RunOptions(), "rate", None).search(seen.append, start=1, limit=2)


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    runs: list[int] = []

    def run(options: RunOptions, folder: Path | None) -> dict[str, Any]:
        runs.append(options.concurrency)
        result = model_of_a_server(options, folder)
        assert folder is not None
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result))
        return result

    base = RunOptions()
    list(Sweeper(base, "concurrency", tmp_path, run=run).sweep([1, 2]))
    points = list(Sweeper(base, "concurrency", tmp_path, run=run).sweep([1, 2, 4]))
    assert runs == [1, 2, 4]
    assert [point.value for point in points] == [1, 2, 4]
    page = sweep_page(points)
    assert page.count("<svg") == 4
    assert "https://" not in page


def test_pareto() -> None:
    options = RunOptions()
    points = [
        Point("rate", load, made(options, [record(n, 0.1, itl, 9, 0) for n in range(count)]))
        for load, itl, count in ((1, 0.01, 1), (2, 0.02, 4), (3, 0.03, 4), (4, 0.04, 40))
    ]
    # More users with slower tokens: the third is beaten by the second in both.
    assert [point.value for point in pareto(points)] == [4, 2, 1]


def test_an_slo_counts_failures_and_cuts_goodput() -> None:
    good = [record(n, 0.05, 0.01, 8) for n in range(99)]
    failed = replace_record(record(99, 0.05, 0.01, 8), error="x", error_kind="server")
    slo = parse_slo("ttft:p99<100ms,tpot<15ms")
    assert slo.met([*good, record(99, 0.05, 0.01, 8)])
    assert not slo.met([*good[:-1], failed, failed])
    assert not slo.met([])
    slow = [record(n, 0.5, 0.01, 8) for n in range(50)]
    result = made(RunOptions(slo="ttft:p50<100ms"), [*good[:50], *slow])
    assert result["figures"]["goodput"]["value"] == pytest.approx(50 / result["seconds"])


def replace_record(old: RequestRecord, **changes: Any) -> RequestRecord:
    for name, value in changes.items():
        setattr(old, name, value)
    return old


def test_intervals_cover_the_truth() -> None:
    rng = random.Random(5)
    covered = 0
    for trial in range(100):
        found = describe([rng.expovariate(1 / 3) for _ in range(60)], trial)
        assert found is not None
        low, high = found.intervals["mean"]
        covered += low <= 3 <= high
    assert covered >= 87, "a 95 % interval should hold about 95 times of 100"
    covered = 0
    for _ in range(200):
        pairs = [(1.0, 1.1 * rng.lognormvariate(0, 0.05)) for _ in range(5)]
        _, low, high = ratio_interval(pairs)
        covered += low <= 1.1 <= high
    assert 180 <= covered <= 199
    ratio, low, high = ratio_bootstrap([1.0] * 50, [2.0] * 50, 50)
    assert (ratio, low, high) == (2.0, 2.0, 2.0)
    assert ratio_interval([(1.0, 2.0)]) == (pytest.approx(2.0), 0.0, math.inf)
    assert describe([]) is None


@pytest.mark.parametrize(
    ("low", "high", "lower_is_better", "verdict"),
    [
        (1.1, 1.3, True, "worse"),
        (1.1, 1.3, False, "better"),
        (0.7, 0.9, True, "better"),
        (0.7, 0.9, False, "worse"),
        (0.97, 1.03, True, "same"),
        (0.9, 1.2, True, "unclear"),
        (1.01, 1.2, True, "unclear"),
    ],
)
def test_verdicts(low: float, high: float, lower_is_better: bool, verdict: str) -> None:
    assert Compared("x", lower_is_better, 1.0, low, high, 0.05).verdict == verdict


def noisy(ttft: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    return made(
        RunOptions(),
        [record(n, ttft * rng.lognormvariate(0, 0.1), 0.01, 8, n / 50) for n in range(60)],
    )


def test_a_regression_is_found_and_noise_is_not() -> None:
    same = compare_pairs([(noisy(0.1, n), noisy(0.1, n + 50)) for n in range(6)], 0.05)
    assert not regressed(same)
    slower = compare_pairs([(noisy(0.1, n), noisy(0.13, n + 50)) for n in range(6)], 0.05)
    assert regressed(slower)
    worse = next(c for c in slower if c.name == "TTFT p50")
    assert worse.verdict == "worse"
    assert worse.ratio == pytest.approx(1.3, rel=0.05)


def test_repeats_are_interleaved_with_fresh_seeds() -> None:
    order: list[tuple[str, int]] = []

    def run(options: RunOptions, _folder: Path | None) -> dict[str, Any]:
        order.append((options.url, options.seed))
        return noisy(0.1, options.seed)

    a, b = RunOptions(url="a"), RunOptions(url="b")
    assert len(interleave(a, b, 3, None, run)) == 3
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    with pytest.raises(InvalidRequest):
        interleave(a, b, 1, None, run)


def test_history(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    history = History(tmp_path / "h.duckdb")
    with pytest.raises(HeadraceError, match="no history"):
        history.metric("ttft_p99")
    for seed in range(3):
        history.add(noisy(0.1 + seed / 10, seed))
    found = history.metric("ttft_p50")
    assert [round(entry.value, 1) for entry in found] == [0.1, 0.2, 0.3]
    assert len(history_chart("ttft_p50", found).series) == 1
    assert len(history.metric("output_throughput", workload="fixed 128/128")) == 3
    other = noisy(0.5, 9)
    other["server"] = {**other["server"], "model": "larger", "version": "9.1"}
    history.add(other)
    every = history.metric("ttft_p50")
    assert len(every) == 4
    assert len(history_chart("ttft_p50", every).series) == 2, "models are not one line"
    assert [e.model for e in history.metric("ttft_p50", model="larger", server="9.")] == ["larger"]
    assert (unit_of("ttft_p50"), unit_of("joules_per_token")) == ("s", "J/tok")
    with pytest.raises(InvalidRequest, match="output_throughput"):
        history.metric("speed")
    for commit in ("aaaaaaa11111", "bbbbbbb22222"):
        later = noisy(0.7, 11)
        later["server"] = {"model": "m", "version": f"1.0.dev+g{commit}", "software": "vllm"}
        later["server"]["commit"] = commit
        history.add(later)
    moved = history.metric("ttft_p50", server="vllm")
    assert [entry.commit for entry in moved] == ["aaaaaaa11111", "bbbbbbb22222"]
    assert len(history_chart("ttft_p50", moved).series) == 1, "commits are what a line goes over"
    assert len(history.metric("ttft_p50", commit="bbbb")) == 1


def test_a_history_of_an_earlier_version_is_read_and_goes_on(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "h.duckdb"
    with duckdb.connect(str(path)) as database:
        database.execute(
            "CREATE TABLE runs (created TIMESTAMP, commit VARCHAR, machine VARCHAR, "
            "model VARCHAR, server VARCHAR, workload VARCHAR, load VARCHAR, valid BOOLEAN, "
            "metrics JSON, options JSON)"
        )
        row = (
            "now()::TIMESTAMP, 'bench00', 'm', 'm', '1', 'w', 'l', true, '{\"ttft_p50\": 1}', '{}'"
        )
        database.execute(f"INSERT INTO runs VALUES ({row})")
    history = History(path)
    assert [entry.commit for entry in history.metric("ttft_p50")] == [""], "it was the bench's"
    history.add(noisy(0.1, 0))
    assert len(history.metric("ttft_p50")) == 2


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"version": "0.1.0", "commit": "0123456789abcdef"}, ("0.1.0", "0123456789ab")),
        ({"version": "0.11.1rc2.dev3+gabc1234d.cu128"}, (None, "abc1234d")),
        ({"version": "0.9.2"}, ("0.9.2", None)),
        ({"build_info": "b4567-abc1234"}, (None, "abc1234")),
        ({"version": "3.3.1", "sha": "a" * 40}, ("3.3.1", "a" * 12)),
        ({"commit": "not one; DROP"}, (None, None)),
        (["nothing"], (None, None)),
    ],
)
def test_servers_tell_who_they_are(told: Any, found: tuple[str | None, str | None]) -> None:
    version, commit = read_identity(told)
    assert commit == found[1]
    assert version == found[0] or found[0] is None


def test_the_commit_is_gits_own() -> None:
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("no checkout")
    # Asked anew: what was remembered may be older than the last commit.
    assert revision.__wrapped__() == done.stdout[:12]


def test_exports_have_the_fields_of_their_tools() -> None:
    records = [record(n, 0.1, 0.01, 8, n / 50) for n in range(20)]
    result = made(RunOptions(), records)
    vllm = vllm_bench(result, records)
    assert vllm["median_ttft_ms"] == pytest.approx(100)
    assert vllm["mean_tpot_ms"] == pytest.approx(10)
    assert vllm["p99_e2el_ms"] == pytest.approx(170)
    assert vllm["completed"] == 20
    assert statistics.mean(map(len, vllm["itls"])) == 7
    assert vllm["latencies"] == pytest.approx([0.17] * 20)
    other = aiperf(result, records)
    assert other["time_to_first_token"]["avg"] == pytest.approx(100)
    assert other["inter_token_latency"]["p50"] == pytest.approx(10)
    assert other["inter_token_latency"]["count"] == 20
    assert other["inter_chunk_latency"]["count"] == 140
    assert other["request_latency"]["p1"] == pytest.approx(170)
    assert other["request_count"]["avg"] == 20
    assert other["total_osl"]["avg"] == 160
    assert other["input_config"]["phases"][0]["type"] == "concurrency"


def test_the_report_needs_no_network() -> None:
    records = [record(n, 0.1, 0.01, 8, n / 50) for n in range(20)]
    result = made(RunOptions(slo="ttft:p99<500ms"), records)
    page = html_report(result)
    assert page.count("<svg") == len(result_charts(result)) == 7
    for outside in ("http://", "https://", "<script", "<link"):
        assert outside not in page.replace("http://127", "")


def believe(folder: Path) -> None:
    """Whether this machine kept up is not asked here."""
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "valid": True, "findings": []}))


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    with MockServer(Behaviour(ttft=0.005, itl=0.001)) as server:
        made_ = runner.invoke(
            command,
            [
                "run",
                "--url",
                server.url,
                "--requests",
                "12",
                "-c",
                "2",
                "--output",
                "6",
                "--input",
                "5",
                "-o",
                str(tmp_path / "run"),
                "--no-history",
                "--json",
            ],
        )
        assert made_.exit_code in (0, 4), made_.output
        assert json.loads(made_.stdout)["succeeded"] == 12
        swept = runner.invoke(
            command,
            [
                "sweep",
                "1,2",
                "--url",
                server.url,
                "--seconds",
                "0.5",
                "--output",
                "4",
                "--input",
                "5",
                "-o",
                str(tmp_path / "sweep"),
            ],
        )
        assert swept.exit_code == 0, swept.output
    for name in ("requests.jsonl", "result.json", "report.html"):
        assert (tmp_path / "run" / name).is_file()
    for form in ("csv", "vllm", "aiperf", "html", "text"):
        again = runner.invoke(command, ["report", str(tmp_path / "run"), "--format", form])
        assert again.exit_code == 0, again.output
    assert (tmp_path / "sweep" / "report.html").is_file()
    believe(tmp_path / "run")
    compared = runner.invoke(command, ["compare", str(tmp_path / "run"), str(tmp_path / "run")])
    assert compared.exit_code == 0
    assert not regressed(compare_single(tmp_path / "run", tmp_path / "run", 0.05))


@pytest.mark.slow
def test_exit_codes(tmp_path: Path) -> None:
    runner = CliRunner()
    with MockServer(Behaviour(ttft=0.005, itl=0.001)) as quick:
        run_bench(RunOptions(url=quick.url, output="6", input="5"), tmp_path / "a")
    with MockServer(Behaviour(ttft=0.1, itl=0.01)) as slow:
        run_bench(RunOptions(url=slow.url, output="6", input="5"), tmp_path / "b")
    believe(tmp_path / "a")
    believe(tmp_path / "b")
    assert (
        runner.invoke(command, ["compare", str(tmp_path / "a"), str(tmp_path / "b")]).exit_code == 3
    )
    assert (
        runner.invoke(command, ["compare", str(tmp_path / "b"), str(tmp_path / "a")]).exit_code == 0
    )
    with MockServer(Behaviour(error_rate=1.0)) as broken:
        failed = runner.invoke(
            command,
            [
                "run",
                "--url",
                broken.url,
                "--requests",
                "4",
                "-o",
                str(tmp_path / "c"),
                "--no-history",
            ],
        )
    assert failed.exit_code == 4
    assert "no request succeeded" in failed.output


@pytest.mark.slow
def test_an_slo_that_nothing_keeps_is_an_error(tmp_path: Path) -> None:
    with MockServer(Behaviour(ttft=0.05, itl=0.001)) as server:
        ended = CliRunner().invoke(
            command,
            [
                "search",
                "ttft:p50<1ms",
                "--url",
                server.url,
                "--seconds",
                "0.5",
                "--input",
                "5",
                "--output",
                "4",
                "--limit",
                "4",
                "-o",
                str(tmp_path),
            ],
        )
    assert isinstance(ended.exception, HeadraceError)
    assert "not even concurrency 1 keeps ttft:p50<1ms" in ended.exception.message
    # What was measured on the way is kept.
    assert (tmp_path / "concurrency-1" / "result.json").is_file()
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("findings", "met", "said"),
    [
        ([Finding("invalid", "client_lag", "the client was late")], True, "does not show whether"),
        ([Finding("invalid", "over_saturated", "more came")], True, "not even concurrency 1 keeps"),
        ([], False, "not even concurrency 1 keeps"),
    ],
)
def test_a_search_says_why_its_points_do_not_count(
    findings: list[Finding],
    met: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def point(_measure: object, options: RunOptions, _folder: Path | None) -> dict[str, Any]:
        result = made(options, [record(n, 0.05, 0.01, 8, n / 100) for n in range(400)])
        result["findings"] = [each._asdict() for each in findings]
        result["valid"] = not findings
        assert result["slo"]["met"] == met
        return result

    monkeypatch.setattr(cli_bench.Measure, "point", point)
    slo = f"ttft:p99<{500 if met else 1}ms"
    ended = CliRunner().invoke(command, ["search", slo, "--limit", "4", "-o", str(tmp_path)])
    assert isinstance(ended.exception, HeadraceError)
    assert said in ended.exception.message
    for finding in findings:
        assert f"does not count: {finding.text}" in ended.output
    swept = CliRunner().invoke(command, ["sweep", "1,2", "--slo", slo, "-o", str(tmp_path / "s")])
    assert swept.output.count("does not count: ") == 2 * len(findings)


def test_a_search_says_where_its_answer_may_be_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def point(_measure: object, options: RunOptions, _folder: Path | None) -> dict[str, Any]:
        result = made(options, [record(n, 0.05, 0.01, 8, n / 100) for n in range(400)])
        if options.concurrency > 1:
            result["findings"] = [Finding("invalid", "client_lag", "late")._asdict()]
            result["valid"] = False
        return result

    monkeypatch.setattr(cli_bench.Measure, "point", point)
    words = ["search", "ttft:p99<500ms", "--limit", "4", "-o", str(tmp_path)]
    ended = CliRunner().invoke(command, words)
    assert ended.exception is None
    assert "largest concurrency: 1" in ended.output
    assert "it may be more: the run at concurrency 2 does not count" in ended.output


def test_a_run_that_is_not_added_to_the_history_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    result = made(RunOptions(), [record(0, 0.05, 0.01, 8, 0.0)])
    result["created"] = "2026-01-01T00:00:00"
    said = remember(result)
    assert said is not None
    assert said.startswith("not added to the history: the history needs duckdb, ")
    assert "pip install " in said


def test_a_comparison_that_cannot_be_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a late client, or interrupted early: which runs, why, and where they are kept."""
    late, early = noisy(0.1, 1), noisy(0.1, 2)
    late |= {"valid": False, "findings": [{"text": "the client was late"}]}
    for pairs, said in (
        ([(early, early), (early, late)], "1 of 4 runs were invalid (1-b): the client was late"),
        ([(early, early)], "interrupted after 1 of 5 pairs"),
        ([], "interrupted after 0 of 5 pairs"),
    ):
        monkeypatch.setattr(
            "headrace.cli.bench.comparing.interleave", lambda *_, pairs=pairs: pairs
        )
        ended = CliRunner().invoke(
            command, ["compare", "http://a", "http://b", "-o", str(tmp_path / "kept")]
        )
        assert isinstance(ended.exception, HeadraceError)
        assert said in ended.exception.message
        assert "kept" in ended.exception.message


def test_a_history_fits_80_columns_and_says_once_what_all_runs_share() -> None:
    long = "qwen2.5-coder-0.5b-instruct-of-a-long-name"
    entries = [
        Entry(f"2026-11-{day} 10:00:00", "abcdef0123", "m", long, "0.1.0", "fixed", load, 12.5)
        for day, load in ((29, "concurrency:4"), (30, "poisson:8"))
    ]
    head, table = cli_bench._runs("output_throughput, tokens/s", entries)
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    lines = out.getvalue().splitlines()
    assert [line.split() for line in lines] == [
        ["created", "load", "value"],
        ["2026-11-29", "10:00", "concurrency:4", "12.5"],
        ["2026-11-30", "10:00", "poisson:8", "12.5"],
    ]
    assert head.startswith("output_throughput, tokens/s; ")
    assert f"model {long}" in head
    assert "commit abcdef0" in head
    assert "; load" not in head
