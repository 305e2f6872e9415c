"""Programs of one engine: order over all of them, limits, deaths, sequences and streams."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from small_programs import double, endless, model, node, one_long_node, port

from headrace.base.errors import (
    DeadlineMissed,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    RunStopped,
    ShuttingDown,
)
from headrace.engine.programs import engine as programs_engine
from headrace.engine.programs import executor, sequences
from headrace.engine.programs.engine import ProgramEngine, SequenceStep
from headrace.engine.programs.files import is_program, program_files
from headrace.engine.programs.prices import RunPrices
from headrace.programs import ProgramLimits
from headrace.programs.confined import ConfinedProgram
from headrace.sched.deadlines import BATCH, REALTIME

LOOP = {"x": np.zeros(1, "f"), "go": np.array(True)}
PASS = {"x": np.ones(1, "f"), "go": np.array(False)}
ONES = {"x": np.ones(3, "f")}


def counting() -> bytes:
    """y = the sum of all x so far, a state."""
    return model(
        [node("Add", "state x", "stateN"), node("Identity", "stateN", "y")],
        [port("x", [1, 2]), port("state", [1, 2])],
        [port("y", [1, 2]), port("stateN", [1, 2])],
    )


def growing() -> bytes:
    """y = all x so far below a row of zeros, a state."""
    return model(
        [node("Concat", "state x", "stateN", axis=0), node("Identity", "stateN", "y")],
        [port("x", [1, 2]), port("state", ["n", 2])],
        [port("y", None), port("stateN", ["m", 2])],
    )


FILES = {
    "double": double("n"),
    "grow": growing(),
    "endless": endless(),
    "long": one_long_node(),
    "sum": counting(),
}


@asynccontextmanager
async def engine_of(
    folder: Path, *names: str, lanes: int = 1, seconds: float = 30.0
) -> AsyncIterator[ProgramEngine]:
    for name in names:
        (folder / f"{name}.onnx").write_bytes(FILES[name])
    files = {name: folder / f"{name}.onnx" for name in names}
    engine = await ProgramEngine.start(files, ProgramLimits(seconds=seconds), lanes=lanes)
    try:
        yield engine
    finally:
        await engine.close()


async def until_running(engine: ProgramEngine, count: int = 1) -> None:
    while engine.executor.running < count:
        await asyncio.sleep(0.001)


async def until_waiting(engine: ProgramEngine, count: int) -> None:
    while len(engine.executor.queue) < count:
        await asyncio.sleep(0.001)


def outcomes(engine: ProgramEngine, name: str) -> dict[str, float]:
    text = generate_latest(engine.registry).decode()
    begin = f'headrace_program_runs_total{{model_name="{name}",outcome="'
    rows = [row.removeprefix(begin) for row in text.splitlines() if row.startswith(begin)]
    return {row.partition('"')[0]: float(row.rpartition(" ")[2]) for row in rows}


async def test_programs_run_beside_each_other(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double", "endless", lanes=2) as engine:
        double, loop = engine.find("double"), engine.find("endless")
        work = asyncio.ensure_future(engine.run(loop, LOOP))
        await until_running(engine)
        found = await asyncio.gather(*(engine.run(double, ONES) for _ in range(20)))
        assert all(one["y"].tolist() == [2, 2, 2] for one in found)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert (await engine.run(loop, PASS))["y"].tolist() == [1]
        while engine.executor.running:
            await asyncio.sleep(0.001)
        assert outcomes(engine, "endless") == {"left": 1, "run": 1}
        assert outcomes(engine, "double") == {"run": 20}


async def test_the_order_is_class_then_deadline_then_arrival(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double", "endless") as engine:
        double, order = engine.find("double"), list[str]()
        work = asyncio.ensure_future(engine.run(engine.find("endless"), LOOP))
        await until_running(engine)

        async def run(name: str, **more: Any) -> None:
            await engine.run(double, ONES, **more)
            order.append(name)

        waiting = [
            asyncio.ensure_future(run(name, **more))
            for name, more in (
                ("batch", {"urgency": BATCH}),
                ("batch soon", {"urgency": BATCH, "timeout": 30.0}),
                ("first", {}),
                ("second", {}),
                ("late", {"timeout": 50.0}),
                ("soon", {"timeout": 40.0}),
            )
        ]
        await until_waiting(engine, 6)
        work.cancel()
        await asyncio.gather(*waiting)
        assert order == ["soon", "late", "first", "second", "batch soon", "batch"]


async def test_what_cannot_end_in_time_is_not_begun(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double", "endless") as engine:
        double = engine.find("double")
        work = asyncio.ensure_future(engine.run(engine.find("endless"), LOOP))
        await until_running(engine)
        with pytest.raises(DeadlineMissed, match=r"not begun after .* its deadline is over") as one:
            await engine.run(double, ONES, timeout=0.05)
        assert (one.value.status, one.value.code) == (504, "deadline_missed")
        for _ in range(2):  # The first one only warms up.
            double.prices.exceeded((("x", (3,)),), 10.0)
        with pytest.raises(DeadlineMissed, match=r"a run takes 10000\.0 ms, and batch comes last"):
            await engine.run(double, ONES, timeout=5.0, urgency=BATCH)
        work.cancel()
        assert outcomes(engine, "double") == {"missed_waiting": 2}


async def test_a_run_is_stopped_at_its_deadline(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "endless") as engine:
        loop = engine.find("endless")
        with pytest.raises(DeadlineMissed, match="stopped at its deadline, after a run of"):
            await engine.run(loop, LOOP, timeout=0.1)
        assert (await engine.run(loop, PASS))["y"].tolist() == [1]
        assert outcomes(engine, "endless") == {"missed_running": 1, "run": 1}
        assert loop.restarts == 0


async def test_the_time_limit_of_a_loop(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "endless", seconds=0.1) as engine:
        with pytest.raises(RunStopped, match=r"stopped after 0\.1 s, its time limit"):
            await engine.run(engine.find("endless"), LOOP)


async def test_one_endless_node_costs_its_own_process_alone(tmp_path: Path) -> None:
    """Its process is killed and replaced; another run of that process begins again, and another
    program notices nothing."""
    async with engine_of(tmp_path, "long", "double", lanes=3, seconds=2.0) as engine:
        long, double = engine.find("long"), engine.find("double")
        pid = double.confined.pid
        quick = {"x": np.ones((1, 1, 1, 1), "f")}
        endless = {"x": np.zeros((1, 1, 2000, 2000), "f")}
        hangs = asyncio.ensure_future(engine.run(long, endless, timeout=0.2))
        await until_running(engine)
        beside = asyncio.ensure_future(engine.run(long, endless, timeout=1e6))
        await until_running(engine, 2)
        assert (await engine.run(double, ONES))["y"].sum() == 6
        with pytest.raises(DeadlineMissed, match=r"did not stop within 0.* s, its limit"):
            await hangs
        assert (await engine.run(long, quick))["y"].min() == 1
        assert long.restarts == 0, "its deadline costs the run beside it nothing"
        with pytest.raises(RunStopped, match=r"did not stop within 2 s, its limit, and was killed"):
            await beside
        assert (await engine.run(long, quick))["y"].min() == 1
        assert (double.confined.pid, long.restarts, double.restarts) == (pid, 2, 0)
        assert outcomes(engine, "long") == {"missed_running": 1, "killed": 1, "run": 2}


async def test_a_process_that_dies_is_replaced_and_its_run_repeated(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "endless", seconds=0.5) as engine:
        loop = engine.find("endless")
        work = asyncio.ensure_future(engine.run(loop, LOOP))
        await until_running(engine)
        assert loop.confined.pid is not None
        os.kill(loop.confined.pid, signal.SIGKILL)
        with pytest.raises(RunStopped, match="its time limit"):
            await work
        assert (loop.restarts, outcomes(engine, "endless")) == (1, {"time": 1})
        work = asyncio.ensure_future(engine.run(loop, LOOP, timeout=20.0))
        for _ in range(2):
            await until_running(engine)
            os.kill(loop.confined.pid, signal.SIGKILL)
            while engine.executor.running and not work.done():
                await asyncio.sleep(0.001)
        with pytest.raises(EngineDead, match="has ended"):
            await work
        assert (await engine.run(loop, PASS))["y"].tolist() == [1]


async def test_a_leaver_costs_the_runs_beside_it_nothing(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "long", lanes=2) as engine:
        long = engine.find("long")
        endless = {"x": np.zeros((1, 1, 2000, 2000), "f")}
        leaves, stays = (asyncio.ensure_future(engine.run(long, endless)) for _ in range(2))
        await until_running(engine, 2)
        limits = [one.begun + 31.0 for one in engine.executor._busy if one is not None]
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        kills = [one.timer.when() for one in engine.executor._busy if one is not None]
        assert kills == pytest.approx(limits, abs=1.0), "not sooner than at the limit"
        await engine.close()
        with pytest.raises(EngineDead):
            await stays


async def test_a_process_that_does_not_start_again_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the error is."""
    async with engine_of(tmp_path, "endless") as engine:
        loop = engine.find("endless")
        starts = iter([RuntimeError("no thread"), OSError("no file")])

        def start() -> Any:
            if (error := next(starts, None)) is not None:
                raise error
            return ConfinedProgram.start(loop.confined)

        monkeypatch.setattr(loop.confined, "start", start)
        work = asyncio.ensure_future(engine.run(loop, LOOP))
        await until_running(engine)
        assert loop.confined.pid is not None
        os.kill(loop.confined.pid, signal.SIGKILL)
        with pytest.raises(EngineDead, match="does not start again: no thread"):
            await work
        while not loop.ready:
            await asyncio.sleep(0.001)
        assert (await engine.run(loop, PASS))["y"].tolist() == [1]


async def test_a_run_whose_caller_leaves_never_begins(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double", "endless") as engine:
        work = asyncio.ensure_future(engine.run(engine.find("endless"), LOOP))
        await until_running(engine)
        waits = asyncio.ensure_future(engine.run(engine.find("double"), ONES))
        await until_waiting(engine, 1)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert len(engine.executor.queue) == 0
        work.cancel()
        assert outcomes(engine, "double") == {"left": 1}


async def test_the_end_of_the_engine_answers_every_run(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "endless") as engine:
        loop = engine.find("endless")
        works = [asyncio.ensure_future(engine.run(loop, LOOP)) for _ in range(3)]
        await until_waiting(engine, 2)
        await engine.close()
        for work in works:
            with pytest.raises((ShuttingDown, EngineDead)):
                await work
        with pytest.raises(ShuttingDown):
            await engine.run(loop, PASS)
        assert not engine.health().ready


async def test_inputs_and_names_are_checked(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double") as engine:
        with pytest.raises(ModelNotFound, match=r"no program 'duble' .*double"):
            engine.find("duble")
        with pytest.raises(InvalidRequest, match="input 'x' is missing"):
            await engine.run(engine.find("double"), {})
        with pytest.raises(InvalidRequest, match="realtime is for the runs of an admitted stream"):
            await engine.run(engine.find("double"), ONES, urgency=REALTIME)
        assert (engine.model_name, engine.executor.running) == ("double", 0)


async def test_a_sequence_keeps_its_states(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "sum", "double", lanes=2) as engine:
        program, x = engine.find("sum"), {"x": np.ones((1, 2), "f")}

        async def step(name: str, *, owner: str = "", **more: bool) -> Any:
            at = SequenceStep(name, **more)
            found = await engine.run(program, x, step=at, owner=owner)
            assert found.keys() == {"y"}
            return found["y"][0, 0]

        assert [await step("a", start=True), await step("a"), await step("a")] == [1, 2, 3]
        assert [await step("b", start=True), await step("a"), await step("b")] == [1, 4, 2]
        together = await asyncio.gather(*(step("a") for _ in range(10)))
        assert together == list(range(5, 15))
        with pytest.raises(InvalidRequest, match="sequence a is not known") as unknown:
            await step("a", owner="another")
        assert unknown.value.code == "sequence_unknown"
        assert await step("a", start=True) == 1
        assert await step("a", end=True) == 2
        with pytest.raises(InvalidRequest, match="is not known"):
            await step("a")
        assert len(engine.sequences) == 1
        with pytest.raises(InvalidRequest, match="double keeps no state"):
            await engine.run(engine.find("double"), ONES, step=SequenceStep("a", start=True))


async def test_an_error_leaves_the_states_and_a_leaver_takes_them(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "sum", "endless") as engine:
        program, x = engine.find("sum"), {"x": np.ones((1, 2), "f")}
        await engine.run(program, x, step=SequenceStep("a", start=True))
        with pytest.raises(InvalidRequest):
            await engine.run(program, {"x": np.ones((1, 3), "f")}, step=SequenceStep("a"))
        found = await engine.run(program, x, step=SequenceStep("a"))
        assert found["y"].tolist() == [[2, 2]]
        work = asyncio.ensure_future(engine.run(engine.find("endless"), LOOP))
        await until_running(engine)
        leaves = asyncio.ensure_future(engine.run(program, x, step=SequenceStep("a")))
        await until_waiting(engine, 1)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        work.cancel()
        assert len(engine.sequences) == 0


async def test_a_sequence_that_begins_anew_is_another(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "sum", "endless") as engine:
        program, x = engine.find("sum"), {"x": np.ones((1, 2), "f")}

        def step(*, start: bool = False) -> asyncio.Future[Any]:
            return asyncio.ensure_future(engine.run(program, x, step=SequenceStep("a", start)))

        await step(start=True)
        work = asyncio.ensure_future(engine.run(engine.find("endless"), LOOP))
        await until_running(engine)
        old = step()
        await until_waiting(engine, 1)
        behind = step()
        while not next(iter(engine.sequences._kept.values())).turn._waiters:
            await asyncio.sleep(0.001)
        new = step(start=True)
        await until_waiting(engine, 2)
        old.cancel()
        with pytest.raises(asyncio.CancelledError):
            await old
        with pytest.raises(InvalidRequest, match="sequence a is not known"):
            await behind
        work.cancel()
        assert (await new)["y"].tolist() == [[1, 1]]
        assert (await step())["y"].tolist() == [[2, 2]]


async def test_states_that_grow_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "MOST_BYTES", 32)
    async with engine_of(tmp_path, "grow") as engine:
        program, x = engine.find("grow"), {"x": np.ones((1, 2), "f")}
        held = engine.sequences._bytes
        for rows in (2, 3, 4):
            found = await engine.run(program, x, step=SequenceStep("a", start=rows == 2))
            assert (found["y"].shape, held.held) == ((rows, 2), 8 * rows)
        for _ in range(2):
            with pytest.raises(Overloaded, match="states have as many bytes"):
                await engine.run(program, x, step=SequenceStep("a"))
            assert held.held == 32
        await engine.run(program, x, step=SequenceStep("a", end=True))
        assert (held.held, len(engine.sequences)) == (0, 0)


def test_sequences_are_bounded_by_number_owner_and_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from headrace.programs.inspection import inspected_bytes

    states = inspected_bytes(counting(), "m.onnx").states
    monkeypatch.setattr(sequences, "MOST_SEQUENCES", 4)
    kept = sequences.Sequences()
    for number in range(2):
        kept.start(("one", "sum", str(number)), states, 0.0)
    with pytest.raises(Overloaded, match="as many sequences"):
        kept.start(("one", "sum", "2"), states, 0.0)
    for number in range(2):
        kept.start(("two", "sum", str(number)), states, 30.0)
    with pytest.raises(Overloaded, match="as many sequences"):
        kept.start(("three", "sum", "0"), states, 30.0)
    kept.find(("one", "sum", "0"), 50.0)
    kept.start(("three", "sum", "0"), states, 61.0)
    with pytest.raises(InvalidRequest, match="is not known"):
        kept.find(("one", "sum", "1"), 61.0)
    assert len(kept) == 4
    kept.expire(1000.0)
    assert len(kept) == 0
    assert (kept._places.held, kept._bytes.held) == (0, 0)


async def test_a_stream_is_admitted_kept_and_ended(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double") as engine:
        program = engine.find("double")
        opened = await engine.open_stream(
            program, {"x": (3,)}, period=0.5, deadline=0.4, owner="one"
        )
        stream = opened.admitted.stream
        assert (stream.period, stream.deadline) == (0.5, 0.4)
        assert 0 < stream.seconds < 0.4
        found = await engine.run(program, ONES, stream=opened.id, owner="one")
        assert found["y"].tolist() == [2, 2, 2]
        with pytest.raises(NotFound, match="no stream"):
            await engine.run(program, ONES, stream=opened.id, owner="two")
        with pytest.raises(InvalidRequest, match="shapes are not those of the stream"):
            await engine.run(program, {"x": np.ones(4, "f")}, stream=opened.id, owner="one")
        with pytest.raises(Overloaded, match="is not admitted"):
            await engine.open_stream(
                program, {"x": (3,)}, period=stream.seconds, deadline=stream.seconds
            )
        assert engine.executor.lanes.utilisation(0) == pytest.approx(stream.utilisation)
        engine.close_stream(opened.id, "one", program)
        with pytest.raises(NotFound):
            engine.close_stream(opened.id, "one", program)
        assert engine.executor.lanes.utilisation(0) == 0
        again = await engine.open_stream(program, {"x": (3,)}, period=0.5, deadline=0.4)
        again.last -= 100
        engine.expire()
        assert not engine.streams


async def test_a_silent_stream_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs_engine, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(programs_engine, "SILENT_PERIODS", 0.001)
    async with engine_of(tmp_path, "double") as engine:
        double = engine.find("double")
        opened = await engine.open_stream(double, {"x": (3,)}, period=10.0, deadline=5.0)
        await engine.run(double, ONES, stream=opened.id)
        while engine.streams:
            await asyncio.sleep(0.001)
        assert asyncio.get_running_loop().time() - opened.last >= 0.3
        assert engine.executor.lanes.utilisation(0) == 0
        with pytest.raises(NotFound, match="no stream"):
            await engine.run(double, ONES, stream=opened.id)


async def test_a_stream_runs_what_it_was_admitted_for(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double") as engine:
        double = engine.find("double")
        opened = await engine.open_stream(double, {}, period=10.0, deadline=5.0)
        with pytest.raises(InvalidRequest, match="shapes are not those of the stream"):
            await engine.run(double, ONES, stream=opened.id)
        with pytest.raises(InvalidRequest, match="is int64; it takes float32"):
            await engine.run(double, {"x": np.ones(1, int)}, stream=opened.id)
        assert opened.admitted._next == -math.inf, "no run was released"
        await engine.run(double, {"x": np.ones(1, "f")}, stream=opened.id)


async def test_shapes_of_a_stream_are_bounded_before_they_are_made(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double") as engine:
        double = engine.find("double")
        most = 2**31 - 1
        for shape in (
            (1,) * 65, (0, 2**62, 4), (2**31,), (most,) * 30_000, (0, *(most,) * 31), (-1,), (257,),
        ):  # fmt: skip
            with pytest.raises(InvalidRequest, match="input x has the shape") as wrong:
                await engine.open_stream(double, {"x": shape}, period=9.0, deadline=9.0, most=1024)
            assert wrong.value.param == "shapes"
        assert len(str(wrong.value)) < 400
        await engine.open_stream(double, {"x": (256,)}, period=9.0, deadline=9.0, most=1024)


async def test_shapes_that_no_longer_run_keep_no_stream_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_of(tmp_path, "double") as engine:
        double, now = engine.find("double"), asyncio.get_running_loop().time()
        for _ in range(2):
            double.prices.observe((("x", (9,)),), 10.0, now)
        monkeypatch.setattr(executor, "LATELY", 1e6)
        with pytest.raises(Overloaded, match=r"beside runs of 10000\.0 ms"):
            await engine.open_stream(double, {"x": (3,)}, period=60.0, deadline=5.0)
        monkeypatch.setattr(executor, "LATELY", 0.0)
        await engine.open_stream(double, {"x": (3,)}, period=60.0, deadline=5.0)
        with pytest.raises(Overloaded, match="is too long beside the admitted streams"):
            await engine.run(double, {"x": np.ones(9, "f")})
        assert double.prices.longest == 10.0


async def test_early_runs_of_a_stream_are_not_before_other_work(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double", "endless") as engine:
        double, order = engine.find("double"), list[str]()
        opened = await engine.open_stream(double, {"x": (3,)}, period=600.0, deadline=300.0)

        async def run(name: str, **more: Any) -> None:
            await engine.run(double, ONES, **more)
            order.append(name)

        work = asyncio.ensure_future(engine.run(engine.find("endless"), LOOP))
        await until_running(engine)
        waiting = [
            asyncio.ensure_future(run(name, **more))
            for name, more in (
                ("released", {"stream": opened.id}),
                ("early", {"stream": opened.id}),
                ("interactive", {}),
            )
        ]
        await until_waiting(engine, 3)
        work.cancel()
        await asyncio.gather(*waiting)
        assert order == ["released", "interactive", "early"]


async def gets_real_time(folder: Path, period: float) -> bool:
    """Whether an early run's period was over before the run ahead of it was stopped for the
    stream."""
    async with engine_of(folder, "double", "endless") as engine:
        double = engine.find("double")
        opened = await engine.open_stream(double, {"x": (3,)}, period=period, deadline=period)
        await engine.run(double, ONES, stream=opened.id)
        work = asyncio.ensure_future(engine.run(engine.find("endless"), LOOP))
        await until_running(engine)
        early = asyncio.ensure_future(engine.run(double, ONES, stream=opened.id))
        await until_waiting(engine, 1)
        (waiting,) = engine.executor.queue.waiting()
        while waiting.urgency == BATCH and not early.done():
            await asyncio.sleep(0.01)
        work.cancel()
        late = waiting.urgency == BATCH
        assert late or (waiting.urgency, waiting.release) == (REALTIME, -math.inf)
        with suppress(DeadlineMissed, Overloaded):  # A busy machine may be late.
            assert (await early)["y"].tolist() == [2, 2, 2]
        with suppress(asyncio.CancelledError, Overloaded):
            await work
        return not late


async def test_an_early_run_gets_real_time_when_its_period_is_over(tmp_path: Path) -> None:
    """The busier the machine, the longer the period that it takes."""
    for period in (1.0, 4.0, 16.0):
        (folder := tmp_path / f"{period}").mkdir()
        if await gets_real_time(folder, period):
            return
    pytest.fail("no early run waited until its period was over")


async def test_runs_too_long_for_the_streams_are_refused(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double", "endless") as engine:
        double, loop = engine.find("double"), engine.find("endless")
        await engine.open_stream(double, {"x": (3,)}, period=1.0, deadline=0.3)
        for _ in range(2):  # The first run of such shapes only warms up.
            with pytest.raises(Overloaded, match="longer runs would delay the admitted") as cut:
                await engine.run(loop, LOOP)
            assert cut.value.code == "blocks_streams"
        with pytest.raises(Overloaded, match="is too long beside the admitted streams"):
            await engine.run(loop, LOOP)
        assert (await engine.run(double, {"x": np.ones(5, "f")}))["y"].sum() == 10


def test_prices_are_of_warm_runs_and_covering_shapes() -> None:
    prices, small, large = RunPrices(), (("x", (1, 2)),), (("x", (4, 4)),)
    prices.observe(large, 9.0)
    assert prices.usual(large) is None
    prices.observe(large, 1.0)
    assert (prices.usual(large), prices.worst(large), prices.usual(small)) == (1.0, 1.0, 1.0)
    prices.observe(large, 2.0)
    assert prices.usual(large) == pytest.approx(1.1)
    assert (prices.worst(large), prices.longest) == (2.0, 2.0)
    for _ in range(1000):
        prices.observe(large, 1.0)
    assert prices.worst(large) == pytest.approx(1.0, abs=0.01)
    assert prices.usual((("x", (5, 1)),)) is None
    for size in range(300):
        prices.observe((("x", (size, size, size)),), 1.0)
    assert len(prices._buckets) == 256
    for _ in range(2):
        prices.exceeded(small, 3.0)
    prices.observe(small, 1.0)
    assert prices.worst(small) == pytest.approx(3.0, abs=0.01)


def test_a_stopped_run_moves_prices_and_a_refusal_lowers_them() -> None:
    prices, shapes = RunPrices(), (("x", (1, 2)),)
    for seconds in (1.0, 1.0):
        prices.observe(shapes, seconds)
    prices.exceeded(shapes, 11.0)
    assert (prices.usual(shapes), prices.worst(shapes)) == (pytest.approx(2.0), 11.0)
    prices.exceeded(shapes, 0.1)
    assert prices.usual(shapes) == pytest.approx(2.0), "it may take longer"
    prices.refused((("x", (1, 1)),))
    assert prices.usual(shapes) == pytest.approx(1.8), "the price was of the covering shapes"
    for size in range(5000):
        prices.exceeded((("x", (size, size, size)),), 1.0)
    assert len(prices._buckets) == 256


async def test_one_slow_run_does_not_refuse_its_shapes_for_good(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double", "endless") as engine:
        double = engine.find("double")
        for _ in range(2):
            double.prices.observe((("x", (3,)),), 10.0)
        refused = 0
        while refused < 100:
            try:
                await engine.run(double, ONES, timeout=2.0)
                break
            except DeadlineMissed:
                refused += 1
        assert 10 < refused < 30


async def test_one_slow_run_beside_streams_does_not_refuse_its_shapes(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double", "endless") as engine:
        double, loop = engine.find("double"), engine.find("endless")
        await engine.open_stream(double, {"x": (3,)}, period=60.0, deadline=0.4)
        for _ in range(2):
            loop.prices.observe((("x", (1,)), ("go", ())), 0.5)
        with pytest.raises(Overloaded, match="is too long beside the admitted streams"):
            await engine.run(loop, PASS)
        refused = 0
        while refused < 100:
            try:
                await engine.run(loop, PASS)
                break
            except Overloaded:
                refused += 1
        assert refused < 30


async def test_one_slow_run_of_a_stream_does_not_end_it(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "double") as engine:
        double = engine.find("double")
        opened = await engine.open_stream(double, {"x": (3,)}, period=60.0, deadline=2.0)
        double.prices.observe((("x", (3,)),), 5.0)
        assert double.prices.worst((("x", (3,)),)) == 5.0
        assert (await engine.run(double, ONES, stream=opened.id))["y"].sum() == 6


def test_programs_are_found_by_name(tmp_path: Path) -> None:
    assert is_program("vad-silero")
    assert is_program("any/where.onnx")
    assert not is_program("qwen3-1.7b")
    assert not is_program("org/name")
    (tmp_path / "a b.onnx").write_bytes(double(1))
    assert list(program_files([str(tmp_path / "a b.onnx")])) == ["a-b"]
    with pytest.raises(Exception, match="would both be served as a-b"):
        program_files([str(tmp_path / "a b.onnx"), str(tmp_path / "sub" / "a-b.onnx")])
    with pytest.raises(ModelNotFound, match=r"no program 'vad-silera'.*vad-silero"):
        program_files(["vad-silera"])
