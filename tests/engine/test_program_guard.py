"""The guard of programs: real bits turned over in the memory of a program's process and in ours,
and modes that come at once and go by steps."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from bit_flips import flip_in_bytes, flip_in_process
from small_programs import double, model, node, port, stored

from headrace.base.config import ServerOptions
from headrace.base.errors import Overloaded
from headrace.engine.programs import guard as guard_module
from headrace.engine.programs.engine import ProgramEngine
from headrace.engine.programs.guard import Mode, ProgramGuard
from headrace.programs import ProgramLimits
from headrace.sched.deadlines import BATCH, INTERACTIVE, REALTIME
from headrace.server.app import create_app

WEIGHTS = np.random.default_rng(7).standard_normal((64, 64)).astype(np.float32)


def weighted() -> bytes:
    """y = x W."""
    product = node("MatMul", "x w", "y")
    return model([product], [port("x", ["n", 64])], [port("y", ["n", 64])], [stored("w", WEIGHTS)])


def drawing() -> bytes:
    """y = x + noise, which its seed repeats."""
    nodes = [node("RandomNormalLike", "x", "r"), node("Add", "x r", "y")]
    return model(nodes, [port("x", [4])], [port("y", [4])])


def picky() -> bytes:
    """A program that does not run with free dimensions of 1."""
    pool = node("MaxPool", "x", "y", kernel_shape=[9, 9])
    return model([pool], [port("x", [1, 1, "h", "w"])], [port("y", None)])


FILES = {"weighted": weighted(), "drawing": drawing(), "picky": picky(), "double": double("n", 3)}
X = np.eye(64, dtype=np.float32)[:1]


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProgramEngine]:
    monkeypatch.setattr(guard_module, "TEST_SECONDS", 0.2)
    monkeypatch.setattr(guard_module, "SAFE_TEST_SECONDS", 0.2)
    monkeypatch.setattr(guard_module, "HOLD_SECONDS", 0.5)
    for name, data in FILES.items():
        (tmp_path / f"{name}.onnx").write_bytes(data)
    files = {name: tmp_path / f"{name}.onnx" for name in FILES}
    made = await ProgramEngine.start(files, ProgramLimits(1 << 28, seconds=20.0), lanes=1)
    yield made
    await made.close()


def guard_of(engine: ProgramEngine, name: str = "weighted") -> ProgramGuard:
    found = engine.programs[name].guard
    assert found is not None
    return found


async def until(guard: ProgramGuard, mode: Mode) -> None:
    async with asyncio.timeout(60):
        while guard.mode is not mode:
            await asyncio.sleep(0.01)


async def run(engine: ProgramEngine) -> Any:
    return (await engine.run(engine.programs["weighted"], {"x": X}))["y"]


async def test_weights_that_change_are_seen_and_replaced(engine: ProgramEngine) -> None:
    """A bit of the running program's weights: the next test sees it, nothing is answered until
    another process has passed three tests."""
    program, guard = engine.programs["weighted"], guard_of(engine)
    right = await run(engine)
    assert np.array_equal(right, WEIGHTS[:1])
    pid = program.confined.pid
    assert pid is not None
    # Weights may lie packed: each line of some floats that is there is hit.
    lines = [WEIGHTS[row, at : at + 4].tobytes() for row in range(3) for at in range(0, 64, 4)]
    hit = flip_in_process(pid, lines)
    assert hit
    assert not np.array_equal(await run(engine), right), "the flip hit nothing that is read"
    await until(guard, Mode.SAFE)
    assert not program.serves
    with pytest.raises(Overloaded, match=r"mode safe since .*other outputs") as refused:
        await run(engine)
    assert refused.value.code == "program_safe"
    await until(guard, Mode.DEGRADED)
    assert program.confined.pid != pid
    assert np.array_equal(await run(engine), right)
    with pytest.raises(Overloaded, match="mode degraded"):
        await engine.run(program, {"x": X}, urgency=BATCH)
    await until(guard, Mode.NORMAL)
    assert np.array_equal((await engine.run(program, {"x": X}, urgency=BATCH))["y"], right)
    read = engine.registry.get_sample_value
    labels = {"model_name": "weighted", "kind": "test", "outcome": "failed"}
    assert read("headrace_program_tests_total", labels) == 1
    assert read("headrace_program_mode", {"model_name": "weighted"}) == 0


async def test_runs_that_wait_are_not_answered_in_safe_mode(engine: ProgramEngine) -> None:
    """They came before, and would begin after."""
    guard = guard_of(engine)
    waiting = [asyncio.ensure_future(run(engine)) for _ in range(200)]
    while engine.executor.running == 0:
        await asyncio.sleep(0)
    guard._move(Mode.SAFE, "a trial")
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(one, Overloaded) for one in found) >= 199


async def test_tests_that_are_asked_for_end_no_mode_early(
    engine: ProgramEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "HOLD_SECONDS", 60.0)
    guard = guard_of(engine)
    guard._move(Mode.SAFE, "a trial")
    for _ in range(4):
        assert await guard.test()
    assert guard.mode is Mode.SAFE
    monkeypatch.setattr(guard_module, "HOLD_SECONDS", 0.0)
    await until(guard, Mode.NORMAL)


async def test_bytes_that_change_are_not_trusted_again(engine: ProgramEngine) -> None:
    """The bytes from which a process is started again: a scrub sees them, and no test heals it."""
    program, guard = engine.programs["weighted"], guard_of(engine)
    app = create_app(engine, ServerOptions())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        good = (await http.post("/v2/models/weighted/test")).json()
        assert good == {
            "model_name": "weighted", "passed": True, "whole": True, "mode": "NORMAL", "reason": "",
        }  # fmt: skip
        data = program.confined.inspection.data
        assert isinstance(data, bytes)
        flip_in_bytes(data, len(data) // 2)
        try:
            bad = (await http.post("/v2/models/weighted/test")).json()
            assert (bad["passed"], bad["whole"], bad["mode"]) == (True, False, "SAFE")
            assert (await http.get("/v2/models/weighted/ready")).status_code == 503
            listed = {one["name"]: one for one in (await http.post("/v2/repository/index")).json()}
            assert listed["weighted"]["reason"] == "it is in safe mode"
            assert listed["double"]["state"] == "READY"
            x = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.0] * 64}
            refused = await http.post("/v2/models/weighted/infer", json={"inputs": [x]})
            assert (refused.status_code, refused.json()["code"]) == (503, "program_safe")
            for _ in range(5):
                assert await guard.test()
            assert guard.mode is Mode.SAFE
        finally:
            flip_in_bytes(data, len(data) // 2)
        assert (await http.post("/v2/models/nobody/test")).status_code == 404


async def test_programs_that_cannot_be_tested_are_served(engine: ProgramEngine) -> None:
    assert await guard_of(engine, "drawing").test() is True, "its draws are those of one seed"
    assert await guard_of(engine, "picky").test() is None
    picture = np.zeros((1, 1, 9, 9), np.float32)
    assert (await engine.run(engine.programs["picky"], {"x": picture}))["y"].shape == (1, 1, 1, 1)


async def test_tests_are_neither_counted_nor_measured(engine: ProgramEngine) -> None:
    for _ in range(3):
        assert await guard_of(engine).test()
    read = engine.registry.get_sample_value
    labels = {"model_name": "weighted", "outcome": "run"}
    assert not read("headrace_program_runs_total", labels)
    assert engine.programs["weighted"].prices.longest == 0


async def test_a_test_that_is_too_long_beside_streams_is_left_out(engine: ProgramEngine) -> None:
    guard = guard_of(engine)
    guard._seconds = 5.0  # As it would be of a large program.
    opened = await engine.open_stream(
        engine.programs["double"], {"x": (1, 3)}, period=1.0, deadline=1.0
    )
    assert await guard.test() is None
    assert guard.mode is Mode.NORMAL
    engine.close_stream(opened.id, "", engine.programs["double"])
    assert await guard.test()


def test_misses_of_streams_degrade_and_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    inspection = SimpleNamespace(data=b"x", outside={})
    program = SimpleNamespace(name="p", confined=SimpleNamespace(inspection=inspection))
    guard = ProgramGuard(program, None, None)  # type: ignore[arg-type]

    def ended(outcome: str, seconds: float = 0.1, lane: int | None = 0) -> None:
        run = SimpleNamespace(lane=lane, arrival=now, deadline=now + seconds, due=0.1)
        guard.note(run, outcome)  # type: ignore[arg-type]

    def allowed(urgency: int) -> bool:
        try:
            guard.check(SimpleNamespace(urgency=urgency))  # type: ignore[arg-type]
        except Overloaded:
            return False
        return True

    for _ in range(50):
        ended("missed_running", seconds=1e-6)  # A client that leaves no time breaks no promise.
        ended("missed_waiting", lane=None)
        ended("left")
    assert guard.mode is Mode.NORMAL
    for _ in range(6):
        ended("missed_waiting")
    assert guard.mode is Mode.NORMAL, "some misses are told, and change nothing"
    for _ in range(3):
        ended("missed_running")
    assert guard.mode is Mode.DEGRADED
    assert [allowed(one) for one in (REALTIME, INTERACTIVE, BATCH)] == [True, True, False]
    for _ in range(40):
        ended("run")
    assert guard.mode is Mode.DEGRADED, "a mode lasts"
    now += 11
    ended("run")
    assert guard.mode is Mode.NORMAL
    assert allowed(BATCH)
    for _ in range(9):
        ended("missed_waiting")
    assert guard.mode is Mode.DEGRADED
    guard._rest()
    assert guard.mode is Mode.DEGRADED
    now += 11
    guard._rest()
    assert guard.mode is Mode.NORMAL, "no stream is left that could show it"
