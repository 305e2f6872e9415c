"""A program in its child: the bits of one that runs here, errors that cross, an end that is sure,
and nothing that the child could open."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from small_programs import INT64, double, endless, model, node, one_long_node, port

from headrace.base.errors import (
    EngineDead,
    InvalidRequest,
    ModelFileError,
    RunStopped,
    UnsupportedModel,
)
from headrace.programs import ForeignProgram, ProgramLimits, region
from headrace.programs import child as child_module
from headrace.programs.confined import ConfinedProgram, LaneFiles
from headrace.programs.inspection import LIMITS, inspected_bytes
from headrace.programs.region import HEAD, Region, RunHead

WAIT = 30.0


@contextmanager
def child(data: bytes, limits: ProgramLimits = LIMITS, lanes: int = 1) -> Iterator[ConfinedProgram]:
    made = ConfinedProgram(inspected_bytes(data, "m.onnx", limits), limits, lanes=lanes)
    try:
        made.start()
        yield made
    finally:
        made.close()


def answered(program: ConfinedProgram, lane: int = 0) -> None:
    waiting = select.poll()
    waiting.register(program.answers(lane), select.POLLIN)
    assert waiting.poll(1e3 * WAIT), "no answer"


NOISE = model(
    [node("RandomNormalLike", "x", "noise"), node("Add", "x noise", "y")],
    [port("x", ["n", "m"])],
    [port("y", None)],
)


def test_a_child_gives_the_bits_of_a_program_that_runs_here() -> None:
    here = ForeignProgram(inspected_bytes(NOISE, "m.onnx"), trial=False)
    with child(NOISE) as program:
        for shape, seed in (((3, 4), 1), ((0, 7), 2), ((200, 300), 3), ((3, 4), 1)):
            feed = {"x": np.random.default_rng(seed).standard_normal(shape).astype("f")}
            assert (
                program.run(feed, seed=seed)["y"].tobytes()
                == here.run(feed, seed=seed)["y"].tobytes()
            )


def test_two_slots_run_at_the_same_time() -> None:
    """The second answers while the first goes on."""
    with child(endless(), lanes=2) as program:
        loop = {"x": np.zeros(1, "f"), "go": np.array(True)}
        program.begin(0, 1, loop, seed=0, seconds=WAIT)
        program.begin(1, 2, {**loop, "go": np.array(False)}, seed=0, seconds=WAIT)
        answered(program, 1)
        assert program.finish(1)["y"].tolist() == [0.0]
        program.stop(0, 9)  # Of another run: it does nothing.
        program.stop(0, 1)
        answered(program)
        with pytest.raises(RunStopped) as stopped:
            program.finish(0)
        assert stopped.value.code == "cancelled"


def test_a_limit_stops_a_loop_and_the_child_goes_on() -> None:
    with child(endless(), ProgramLimits(seconds=0.2)) as program:
        pid = program.pid
        with pytest.raises(RunStopped, match=r"m\.onnx was stopped after 0\.2 s"):
            program.run({"x": np.zeros(1, "f"), "go": np.array(True)})
        assert program.run({"x": np.ones(1, "f"), "go": np.array(False)})["y"].tolist() == [1.0]
        assert program.pid == pid


def test_one_node_without_end_is_killed_with_its_process() -> None:
    with child(one_long_node(), ProgramLimits(seconds=0.2)) as program:
        assert program.run({"x": np.ones((1, 1, 1, 1), "f")})["y"].shape == (1, 1, 2001, 2001)
        process = psutil.Process(program.pid)
        with pytest.raises(RunStopped, match=r"did not stop within 0\.2 s.* killed") as stopped:
            program.run({"x": np.zeros((1, 1, 2000, 2000), "f")})
        assert stopped.value.code == "time"
        process.wait(WAIT)
        program.reap()
        program.start()
        assert program.run({"x": np.ones((1, 1, 1, 1), "f")})["y"].min() == 1


def test_errors_cross_with_their_class_and_field() -> None:
    data = model(
        [node("Gather", "t i", "y")], [port("t", [3]), port("i", ["n"], INT64)], [port("y", None)]
    )
    with child(data) as program:
        feed = {"t": np.zeros(3, "f"), "i": np.array([5])}
        with pytest.raises(InvalidRequest, match=r"cannot run on these inputs: .*indices") as wrong:
            program.run(feed)
        assert wrong.value.param == "inputs"
        with pytest.raises(InvalidRequest, match="input 'i' is missing"):
            program.run({"t": feed["t"]})
        assert program.run({**feed, "i": np.array([2, 0])})["y"].tolist() == [0, 0]


def test_what_does_not_fit_in_the_region_is_refused() -> None:
    limits = ProgramLimits(memory=1 << 20)
    with child(double("n"), limits) as program:
        with pytest.raises(InvalidRequest, match=r"x has 2,000,000 bytes"):
            program.run({"x": np.zeros(500_000, "f")})
        with pytest.raises(InvalidRequest, match=r"y has 800,000 bytes"):
            program.run({"x": np.zeros(200_000, "f")})
        assert program.run({"x": np.ones(100, "f")})["y"].sum() == 200


def test_a_dead_child_is_seen_and_replaced() -> None:
    with child(double("n")) as program:
        assert program.pid is not None
        os.kill(program.pid, signal.SIGKILL)
        answered(program)
        with pytest.raises(EngineDead, match=r"the process of m\.onnx has ended"):
            program.finish(0)
        program.reap()
        program.start()
        assert program.run({"x": np.ones(2, "f")})["y"].tolist() == [2, 2]


def test_a_child_ends_with_its_parent() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from small_programs import double
from headrace.programs.confined import ConfinedProgram
from headrace.programs.inspection import inspected_bytes
program = ConfinedProgram(inspected_bytes(double(1), "m.onnx"))
program.start()
print(program.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    process = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    process.wait(WAIT)


def test_no_thread_of_a_child_can_open_a_file() -> None:
    """Each slot's thread was begun before the confinement, and is under it."""
    code = """
import os, sys, threading
from headrace.media.seccomp import confine, leave_networks
go, found = threading.Event(), []
def work():
    go.wait()
    for act in (lambda: os.open("/etc/hostname", os.O_RDONLY), lambda: os.listdir("/"), os.fork):
        try:
            found.append(act())
        except OSError as error:
            found.append(error.errno)
leave_networks()
thread = threading.Thread(target=work)
thread.start()
confine(-1, -1, 0)
go.set()
thread.join()
os.write(1, repr(found).encode())
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert said.stdout == b"[1, 1, 1]"


def test_a_child_that_ends_while_it_loads_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.programs.confined.sys.executable", "/bin/false")
    program = ConfinedProgram(inspected_bytes(double(1), "m.onnx"), lanes=2)
    with pytest.raises(UnsupportedModel, match=r"ends the process that loads it, .*\(status 1\)"):
        program.start()
    program.close()


HEADS: dict[str, Any] = {
    "type": [[["y", "object", [1], HEAD]]],
    "shape": [[["y", "float32", [-1], HEAD]]],
    "product": [[["y", "float32", [2**40, 2**40], HEAD]]],
    "place before": [[["y", "float32", [1], HEAD - 4]]],
    "place behind": [[["y", "float32", [1], HEAD + 4093]]],
    "unaligned": [[["y", "float32", [2**62], HEAD + 4000]]],
    "no list": {"tensors": 1},
    "beyond int64": [[["y", "float32", [0, 2**63], HEAD]]],
    "empty beyond int64": [[["y", "float32", [0, 2**62, 4], HEAD]]],
    "one place twice": [[["y", "float32", [600], HEAD], ["z", "float32", [600], HEAD]]],
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_lies_is_refused(name: str) -> None:
    own = Region.make(4096)
    told = msgspec.msgpack.encode(HEADS[name])
    own._bytes[: len(told)] = np.frombuffer(told, np.uint8)
    with pytest.raises(ModelFileError, match="answers what no program does"):
        own.get(len(told))
    for length in (0, HEAD + 1, 2**32 - 1, 3):
        with pytest.raises(ModelFileError):
            own.get(length)
    own.close()


def test_other_outputs_than_its_own_are_no_answer() -> None:
    with child(double("n")) as program:
        program.begin(0, 1, {"x": np.ones(2, "f")}, seed=0, seconds=WAIT)
        answered(program)
        written = program._lanes[0].region._bytes
        at = int(written[:64].tobytes().index(b"\xa1y"))
        written[at + 1] = ord("z")
        with pytest.raises(EngineDead, match="answers other outputs than it has"):
            program.finish(0)


def test_no_order_waits_for_a_child_that_reads_no_more() -> None:
    with child(endless()) as program:
        assert program.pid is not None
        os.kill(program.pid, signal.SIGSTOP)
        for _ in range(20_000):
            program.stop(0, 1)
        feed = {"x": np.zeros(1, "f"), "go": np.array(False)}
        with suppress(EngineDead):
            for number in range(20_000):
                program.begin(0, number, feed, seed=0, seconds=WAIT)
        assert number < 19_999, "the pipe is full, and that is told"


@pytest.mark.parametrize("at", range(1, 6))
def test_a_start_that_fails_leaves_nothing_open(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pipe in turn, and the memory of the file."""
    made, opened, pipe = inspected_bytes(double(1), "m.onnx"), 0, os.pipe
    program = ConfinedProgram(made, lanes=2)

    def failing() -> tuple[int, int]:
        nonlocal opened
        opened += 1
        if opened == at:
            raise OSError("no more files")
        return pipe()

    def full(*parts: bytes) -> int:
        raise OSError("no more files")

    gc.collect()  # What other tests left may close files in between.
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        if at < 5:
            patch.setattr(os, "pipe", failing)
        else:
            patch.setattr("headrace.programs.confined.unnamed_file", full)
        with pytest.raises(OSError, match="no more files"):
            program.start()
    assert sorted(os.listdir("/proc/self/fd")) == before
    program.start()
    program.close()


def test_lanes_that_cannot_be_made_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sizes, truncate = inspected_bytes(double(1), "m.onnx"), list[int](), os.ftruncate

    def failing(file: int, size: int) -> None:
        sizes.append(size)
        if len(sizes) == 3:
            raise OSError("no space")
        truncate(file, size)

    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "ftruncate", failing)
    with pytest.raises(OSError, match="no space"):
        ConfinedProgram(made, lanes=4)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_killed_child_gives_the_memory_of_its_runs_back() -> None:
    with child(endless("n")) as program:
        feed = {"x": np.ones(8 << 20, "f"), "go": np.array(True)}
        program.begin(0, 1, feed, seed=0, seconds=WAIT)
        file = program._regions[0].file
        assert os.fstat(file).st_blocks * 512 >= 32 << 20
        program.kill()
        program.reap()
        assert os.fstat(file).st_blocks * 512 <= 1 << 20
        program.start()


class _Stopping(int):
    """A number whose comparison lets the other thread stop the run."""

    lane: child_module.ChildLane

    def __eq__(self, other: object) -> bool:
        self.lane.stop(1)
        return False

    __hash__ = int.__hash__


def test_a_stop_between_the_check_and_the_run_is_kept() -> None:
    own, seen = Region.make(4096), list[bool]()
    lane = child_module.ChildLane(LaneFiles(own.file, -1, -1), own.size)

    class Told:
        def run(self, feed: Any, *, options: Any, **more: Any) -> dict[str, Any]:
            seen.append(options.terminate)
            return {}

    lane.open(Told())  # type: ignore[arg-type]
    lane._stopped = number = _Stopping(0)
    number.lane = lane
    lane._run(own.put({}, RunHead([])), 1)
    assert seen == [True]
    own.close()


def test_a_region_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "KEPT", 1 << 20)
    own = Region.make(1 << 26)
    own.put({"x": np.ones(1 << 22, "f")}, RunHead([]))
    filled = os.fstat(own.file).st_blocks
    own.clear(HEAD + (1 << 24))
    assert os.fstat(own.file).st_blocks < filled / 4
    own.clear(HEAD + 10)
    own.close()
