"""MLPerf's compliance tests, data sets, recorded traces and the reader of submissions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace.base.errors import InvalidRequest
from headrace.bench.lengths import Lengths
from headrace.bench.material import Material
from headrace.bench.mlperf_accuracy import LOG, scores_of, truncate_logs
from headrace.bench.mlperf_compliance import (
    Logged,
    read_logged,
    verify_lengths,
    verify_same,
    verify_score,
    verify_tokens,
    write_verdicts,
)
from headrace.bench.mlperf_samples import from_dataset, from_trace
from headrace.bench.mlperf_submission import check_submission, describe_system
from headrace.bench.mock import Behaviour, MockServer
from headrace.cli.bench import command

OUTPUT = Lengths("fixed", 16)


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_data_sets_are_read_as_mlperf_has_them(tmp_path: Path) -> None:
    rows = [
        {"tok_input": [5, 6, 7], "output": "a summary"},
        {"question": "2 + 2?", "ground_truth": 4, "max_tokens": 9},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]},
    ]
    found = from_dataset(jsonl(tmp_path / "d.jsonl", *rows), OUTPUT, None)
    (tmp_path / "d.json").write_text(json.dumps(rows))
    assert from_dataset(tmp_path / "d.json", OUTPUT, None) == found
    assert found[0].turn.ids == [5, 6, 7]
    assert [sample.truth for sample in found] == ["a summary", "4", None]
    assert [sample.turn.output_tokens for sample in found] == [16, 9, 16]
    assert [len(sample.history) for sample in found] == [0, 1, 2]
    assert len(from_dataset(tmp_path / "d.json", OUTPUT, 1)) == 1


def test_parquet(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = tmp_path / "d.parquet"
    with duckdb.connect() as database:
        database.execute(
            f"COPY (SELECT [1, 2] AS input_tokens, 'x' AS answer) TO '{path}' (FORMAT parquet)"
        )
    (sample,) = from_dataset(path, OUTPUT, None)
    assert (sample.turn.ids, sample.truth) == ([1, 2], "x")
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(InvalidRequest):
        from_dataset(path, OUTPUT, None)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("d.pkl", "", "could run anything"),
        ("d.json", "{", "d.json"),
        ("d.json", "{}", "no list"),
        ("d.json", "[]", "no sample"),
        ("d.jsonl", '{"input": "a"}\n{"inputs": "b"}\n', "row 2"),
        ("d.jsonl", '{"tok_input": []}\n', "empty"),
        ("d.jsonl", "[1]\n", "no object"),
    ],
)
def test_what_is_no_data_set(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=why):
        from_dataset(tmp_path / name, OUTPUT, None)


def test_a_recorded_agent_is_a_sample_a_turn(tmp_path: Path) -> None:
    said = [
        {"role": "system", "content": "tools"},
        {"role": "user", "content": "fix it"},
        {"role": "assistant", "content": "reading"},
        {"role": "tool", "content": "a file"},
        {"role": "assistant", "content": "done"},
    ]
    path = jsonl(tmp_path / "t.jsonl", {"messages": said})
    first, second = from_trace(f"prompts:{path}", Material(), None)
    assert [m["content"] for m in first.history] == ["tools", "fix it"]
    assert [m["content"] for m in second.history] == ["tools", "fix it", "reading", "a file"]
    assert (first.truth, second.truth) == ("reading", "done")
    unanswered = jsonl(tmp_path / "u.jsonl", {"turns": [{"text": "a"}, {"text": "b"}]})
    with pytest.raises(InvalidRequest, match="recorded answers"):
        from_trace(f"prompts:{unanswered}", Material(), None)


def ids(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def test_each_test_finds_what_it_is_for(tmp_path: Path) -> None:
    good = Logged(0, ids(7, 8, 2), ids(7), 3)
    assert all(v.passed for v in verify_tokens([good], ids=True, end=2, offline=False))
    for wrong, place in (
        (Logged(0, ids(7, 8, 2), ids(9), 3), 0),
        (Logged(0, ids(7, 2, 2), ids(7), 3), 1),
        (Logged(0, ids(7, 8, 2), ids(7), 9), 2),
    ):
        verdicts = verify_tokens([good, wrong], ids=True, end=2, offline=False)
        assert [v.passed for v in verdicts] == [n != place for n in range(3)]
    blind = verify_tokens([Logged(0, b"text", b"te", 2)], ids=False, end=2, offline=False)
    assert [v.passed for v in blind] == [True, None, None], "what cannot be asked is not passed"
    offline = verify_tokens([Logged(0, ids(7), b"", 1)], ids=True, end=None, offline=True)
    assert [v.passed for v in offline] == [None, None, True]
    assert verify_lengths([good], 3.2).passed
    assert not verify_lengths([good], 4.0).passed
    assert verify_lengths([good], None).passed is None
    assert verify_score(61.0, 60.7).passed
    assert not verify_score(60.0, 60.7).passed
    entry = {"qsl_idx": 0, "data": ids(7, 8, 2).hex()}
    (tmp_path / LOG).write_text(json.dumps([entry]))
    assert verify_same([good], tmp_path).passed
    assert not verify_same([good, Logged(1, b"", b"", 0)], tmp_path).passed
    assert not write_verdicts(tmp_path, "TEST07", [verify_score(None, 1.0)]), "nothing was asked"
    with pytest.raises(InvalidRequest):
        read_logged(tmp_path / "none")


def test_scores() -> None:
    assert scores_of({0: "a b", 1: "so 1,024"}, ["a b", "1024"]) == {
        "rougeL": pytest.approx(50.0),
        "exact_match": 100.0,
    }
    assert scores_of({0: "a"}, [None]) is None


@pytest.mark.slow
def test_a_submission_of_a_data_set(tmp_path: Path) -> None:
    """All that a scenario needs, through the real LoadGen, and what the reader says of it."""
    pytest.importorskip("mlperf_loadgen")
    data = jsonl(
        tmp_path / "d.jsonl",
        *({"input": f"question {n}", "output": " tok" * 6, "max_tokens": 6} for n in range(16)),
    )
    runner, root = CliRunner(), tmp_path / "open" / "us"
    conf = tmp_path / "user.conf"
    conf.write_text("*.Offline.min_duration = 600\n*.Offline.target_qps = 40\n")
    common = ["mlperf", "Offline", "--dataset", str(data), "--token-ids", "-o", str(root)]
    common += ["--user-conf", str(conf), "--eos-id", "2", "--submitter", "us"]
    place = root / "results" / "this" / "mock" / "Offline"
    with MockServer(Behaviour(ttft=0.004, itl=0.001)) as server:
        common += ["--url", server.url]
        accuracy = runner.invoke(command, [*common, "--mode", "accuracy"])
        assert accuracy.exit_code == 0, accuracy.output
        assert "rougeL: 100.000 %" in accuracy.output
        assert "hash=" in (place / "accuracy" / "accuracy.txt").read_text()
        assert len(read_logged(place / "accuracy")) == 16
        assert "ignore_eos" not in server.seen.bodies[-1], "a data set's answers end by themselves"
        performance = runner.invoke(command, common)
        assert "unverified by MLCommons" in performance.output
        for test, more, passes in (
            ("TEST06", [], True),
            ("TEST07", ["--accuracy-threshold", "99"], True),
            ("TEST09", ["--reference-tokens", "6"], True),
            ("TEST09", ["--reference-tokens", "9"], False),
        ):
            done = runner.invoke(command, [*common, "--test", test, *more])
            assert done.exit_code == (0 if passes else 3), done.output
            assert f"{test} {'passed' if passes else 'FAILED'}" in done.output
            assert (place / test / "accuracy" / LOG).is_file()
        same = runner.invoke(command, [*common, "--test", "TEST01"])
        assert "Accuracy check pass: True" in same.output, same.output
    assert (place / "user.conf").read_text() == conf.read_text()
    checks = {
        (check.place.rpartition("/")[2], check.what): check for check in check_submission(root)
    }
    assert checks["performance", "LoadGen's seeds"].passed
    assert checks["accuracy", "all of the data set"].passed
    assert checks["TEST06", "verify_accuracy.txt passes"].passed
    assert not checks["TEST09", "verify_output_len.txt passes"].passed
    assert not checks["performance", "600 s at least"].passed
    assert not checks["this.json", "says what it must"].passed, "storage is the user's to say"
    shown = runner.invoke(command, ["mlperf-check", str(root)])
    assert shown.exit_code == 4
    assert "600 s at least" in shown.output


def test_logs_are_cut_with_a_copy(tmp_path: Path) -> None:
    folder = tmp_path / "s" / "accuracy"
    folder.mkdir(parents=True)
    text = "x" * 20_000
    (folder / LOG).write_text(text)
    assert truncate_logs(tmp_path / "s", tmp_path / "whole") == [folder / LOG]
    assert (tmp_path / "whole" / "accuracy" / LOG).read_text() == text
    assert (folder / LOG).stat().st_size <= 10 * 1024
    assert truncate_logs(tmp_path / "s", tmp_path / "whole") == [], "once is enough"


def test_a_system_tells_what_it_knows() -> None:
    told = describe_system("box", "open", "us")
    assert told["host_processor_model_name"]
    assert told["host_storage_type"] == "", "nothing is guessed"
    with pytest.raises(InvalidRequest, match="results"):
        check_submission(Path("/nonexistent"))
