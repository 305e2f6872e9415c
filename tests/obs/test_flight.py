from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.drafted import Verified
from headrace.base.request import StepStats
from headrace.base.step import StepPlan, StepResult
from headrace.obs.flight import FlightRecorder, read_flight, write_dump


def plan(number: int, entries: int = 2) -> StepPlan:
    rows = list(range(entries))
    return StepPlan(number, rows, [10**9] * entries, [3] * entries, [True] * entries, drafts=2)


def test_the_ring_keeps_the_last_steps_in_order(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "f", records=8)
    for number in range(20):
        recorder.submitted(plan(number), 2, 0)
        if number < 19:
            verified = {1: Verified("suffix", 2, 0)}
            result = StepResult(number, [[1], [2]], seconds=0.5, verified=verified)
            recorder.finished(plan(number), result, StepStats(kv_usage=0.5))
    steps = read_flight(tmp_path / "f")
    assert [step["step"] for step in steps] == list(range(12, 20))
    assert [step["state"] for step in steps] == ["done"] * 7 + ["submitted"]
    assert (steps[0]["sampled"], steps[0]["drafts"]) == (2, 2)
    assert steps[0]["kv_usage"] == 0.5
    assert steps[0]["verified"] == [[1, "suffix", 2, 0]]
    assert recorder.read() == steps


def test_a_large_plan_fits_and_a_failure_is_told(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "f", records=8)
    recorder.submitted(plan(3, entries=1024), 1024, 5)
    (step,) = recorder.read()
    assert step["entries"] == 1024
    assert len(step["rows"]) == 24
    failed = StepResult(3, [[]] * 1024, error="\x00" * 5000)
    recorder.finished(plan(3, entries=1024), failed, StepStats())
    (step,) = recorder.read()
    assert (step["state"], step["tokens"]) == ("failed", 3072)


def test_the_ring_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "f"
    code = (
        "import sys, time; sys.path[:] = " + repr(sys.path) + "\n"
        "from pathlib import Path\n"
        "from headrace.obs.flight import FlightRecorder\n"
        "from headrace.base.step import StepPlan\n"
        f"r = FlightRecorder(Path({str(path)!r}))\n"
        "r.submitted(StepPlan(7, [0], [0], [5], [True]), 1, 0)\n"
        "print('there', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        os.kill(child.pid, signal.SIGKILL)
    (step,) = read_flight(path)
    assert (step["step"], step["state"], step["counts"]) == (7, "submitted", [5])


def test_damaged_and_missing_files_give_what_they_have(tmp_path: Path) -> None:
    assert read_flight(tmp_path / "none") == []
    path = tmp_path / "f"
    recorder = FlightRecorder(path, records=4)
    recorder.submitted(plan(1), 1, 0)
    data = bytearray(path.read_bytes())
    data[2 * 2048 : 2 * 2048 + 8] = b"\xff" * 8  # A length that lies.
    data[3 * 2048 : 3 * 2048 + 8] = b"\x04\x00\x00\x00{]{]"
    path.write_bytes(data[:-100])
    assert [step["step"] for step in read_flight(path)] == [1]


def test_dumps_are_bounded_and_a_full_disk_is_no_failure(tmp_path: Path) -> None:
    def dump(folder: Path) -> Path | None:
        return write_dump(
            folder, kind="hang", reason="r", stacks="a\nb", steps=[{"step": 1}], details={"x": 1}
        )

    for _ in range(25):
        path = dump(tmp_path / "dumps")
    assert path is not None
    record = json.loads(path.read_text())
    assert (record["kind"], record["stacks"], record["x"]) == ("hang", ["a", "b"], 1)
    assert len(list((tmp_path / "dumps").iterdir())) == 20
    (tmp_path / "file").touch()
    assert dump(tmp_path / "file") is None


ON_A_FULL_DISK = """
import sys
from pathlib import Path
from headrace.obs.flight import FlightRecorder
from headrace.base.step import StepPlan

recorder = FlightRecorder(Path(sys.argv[1]) / "f")
for number in range(300):
    recorder.submitted(StepPlan(number, [0], [0], [1], [True]), 1, 0)
print(len(recorder.read()), (Path(sys.argv[1]) / "f").exists())
"""


def test_a_full_disk_costs_the_file_and_not_the_engine(tmp_path: Path) -> None:
    """A hole of a mapped file on a full disk is a SIGBUS at the first write to it."""
    room = 'mount -t tmpfs -o size=64k tmpfs "$2" && exec "$0" -c "$1" "$2"'
    command = ["unshare", "--mount", "sh", "-c", room, sys.executable, ON_A_FULL_DISK, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout.split()) == (0, ["256", "False"]), done.stderr
