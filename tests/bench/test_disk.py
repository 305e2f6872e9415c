"""Full disks, folders that cannot be written, runs that were killed: what was measured is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.bench.history import History
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import RunOptions
from headrace.bench.recovery import can_recover, recover
from headrace.bench.result import read_result
from headrace.bench.run import run_bench
from headrace.bench.store import write_text
from headrace.cli.bench import command

QUICK = Behaviour(ttft=0.005, itl=0.001)


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with MockServer(QUICK) as server:
        with pytest.raises(InvalidRequest, match="cannot write to") as error:
            run_bench(RunOptions(url=server.url, requests=2), file / "run")
        assert error.value.param == "out"
        assert server.seen.requests == 0
        swept = CliRunner().invoke(
            command, ["sweep", "1", "--url", server.url, "-o", str(file / "sweep")]
        )
    assert isinstance(swept.exception, InvalidRequest)


def test_a_full_disk_ends_with_the_numbers_and_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "requests.jsonl").symlink_to("/dev/full")
    with MockServer(QUICK) as server:
        ended = CliRunner().invoke(
            command,
            [
                "run",
                "--url",
                server.url,
                "--requests",
                "6",
                "--input",
                "5",
                "--output",
                "4",
                "--no-history",
                "-o",
                str(folder),
            ],
        )
    assert ended.exit_code == 1
    assert "6 of 6 requests succeeded" in ended.output
    assert "No space left" in ended.output
    assert "report:" not in ended.output


def test_a_closed_pipe_leaves_the_files(tmp_path: Path) -> None:
    # As in `headrace bench run … | head -1`.
    with MockServer(QUICK) as server:
        run = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "headrace",
                "bench",
                "run",
                "--url",
                server.url,
                "--requests",
                "4",
                "--input",
                "5",
                "--output",
                "4",
                "--no-history",
                "-o",
                str(tmp_path),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert run.stdout is not None
        run.stdout.close()
        run.wait(300)
    assert (tmp_path / "report.html").is_file()


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    assert write_text(tmp_path / "a", "x").read_text() == "x"
    with pytest.raises(HeadraceError, match="was not written: No such file"):
        write_text(tmp_path / "none" / "a", "x")
    (tmp_path / ".b.partial").symlink_to("/dev/full")
    with pytest.raises(HeadraceError, match="No space left"):
        write_text(tmp_path / "b", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    with MockServer(QUICK) as server:
        run_bench(RunOptions(url=server.url, requests=2, output="4"), tmp_path)
    (tmp_path / "file").touch()
    written = CliRunner().invoke(
        command, ["report", str(tmp_path), "--format", "csv", "-o", str(tmp_path / "file" / "in")]
    )
    assert isinstance(written.exception, HeadraceError)
    assert "file/in: Not a directory" in written.exception.message
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / ".requests.csv.partial").symlink_to("/dev/full")
    written = CliRunner().invoke(
        command, ["report", str(tmp_path), "--format", "csv", "-o", str(tmp_path / "place")]
    )
    assert isinstance(written.exception, HeadraceError)
    assert "was not written" in written.exception.message


def test_a_history_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    (tmp_path / "file").touch()
    with MockServer(QUICK) as server:
        result = run_bench(RunOptions(url=server.url, requests=2, output="4")).result
    with pytest.raises(HeadraceError, match="file"):
        History(tmp_path / "file" / "h.duckdb").add(result)


def begun(url: str, folder: Path) -> subprocess.Popen[str]:
    """A run that would take very long, after its first twenty requests."""
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "headrace",
            "bench",
            "run",
            "--url",
            url,
            "--requests",
            "100000",
            "-c",
            "2",
            "--input",
            "5",
            "--output",
            "4",
            "--no-history",
            "--api-key",
            "secret",
            "-o",
            str(folder),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ},
    )
    requests, end = folder / "requests.jsonl", time.monotonic() + 300
    while time.monotonic() < end and not (
        requests.is_file() and requests.read_bytes().count(b"\n") > 20
    ):
        time.sleep(0.05)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_was_measured(
    tmp_path: Path, with_signal: signal.Signals
) -> None:
    folder = tmp_path / "run"
    with MockServer(Behaviour(ttft=0.02, itl=0.001)) as server:
        run = begun(server.url, folder)
        run.send_signal(with_signal)
        output, _ = run.communicate(timeout=300)
    assert "the run was interrupted" in output
    assert "Traceback" not in output
    result = read_result(folder)
    assert result["interrupted"]
    assert result["succeeded"] > 20
    assert (folder / "report.html").is_file()
    # And once more from the records, had the result been cut off while it was written.
    (folder / "result.json").write_text('{"schema": "headrace.ben')
    with pytest.raises(InvalidRequest, match=r"not whole JSON .*requests.jsonl"):
        read_result(folder)
    again = CliRunner().invoke(command, ["report", str(folder)])
    assert again.exit_code == 0
    assert f"{result['succeeded']} of" in again.output


@pytest.mark.slow
def test_a_killed_run_is_recovered(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with MockServer(Behaviour(ttft=0.02, itl=0.001)) as server:
        run = begun(server.url, folder)
        run.kill()
        run.communicate()
    requests = folder / "requests.jsonl"
    assert can_recover(folder)
    assert "secret" not in (folder / "run.json").read_text()
    with requests.open("ab") as file:
        file.write(b'{"number": 7, "sess')
    result = recover(folder)
    assert result["succeeded"] > 20
    assert result["interrupted"]
    assert {"recovered", "interrupted"} <= {finding["code"] for finding in result["findings"]}
    shown = CliRunner().invoke(command, ["report", str(folder)])
    assert shown.exit_code == 0
    assert "the run was killed" in shown.output


def test_what_cannot_be_recovered(tmp_path: Path) -> None:
    assert not can_recover(tmp_path)
    (tmp_path / "requests.jsonl").touch()
    for text in ("{", json.dumps({"schema": "x"}), json.dumps({"options": {}})):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(InvalidRequest, match="no start of a run"):
            recover(tmp_path)
    options = RunOptions().public()
    whole = {"schema": "headrace.bench.started/1", "options": options, "server": {}}
    (tmp_path / "run.json").write_text(json.dumps(whole))
    with pytest.raises(InvalidRequest, match="no request"):
        recover(tmp_path)
