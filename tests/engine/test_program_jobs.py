"""Jobs of several runs: order, price, deadline, cancelling, and their turns."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from small_programs import double, endless

from headrace.base.errors import (
    DeadlineMissed,
    EngineFault,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
)
from headrace.engine.programs import executor
from headrace.engine.programs.engine import ProgramEngine
from headrace.engine.programs.jobs import JobTurns
from headrace.engine.programs.ocr import run_step
from headrace.sched.deadlines import BATCH, TimedWork

ONES, SHAPES = {"x": np.ones(3, "f")}, (("x", (3,)),)
LOOP = {"x": np.zeros(1, "f"), "go": np.array(True)}


@asynccontextmanager
async def engine_of(folder: Path, lanes: int = 1) -> AsyncIterator[ProgramEngine]:
    files = {"double": double("n"), "endless": endless()}
    for name, data in files.items():
        (folder / f"{name}.onnx").write_bytes(data)
    paths = {name: folder / f"{name}.onnx" for name in files}
    engine = await ProgramEngine.start(paths, lanes=lanes)
    try:
        yield engine
    finally:
        await engine.close()


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def outcomes(engine: ProgramEngine) -> dict[str, float]:
    text = generate_latest(engine.registry).decode()
    begin = 'headrace_program_jobs_total{model_name="job",outcome="'
    rows = [row.removeprefix(begin) for row in text.splitlines() if row.startswith(begin)]
    return {row.partition('"')[0]: float(row.rpartition(" ")[2]) for row in rows}


async def test_a_job_runs_several_programs_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "MOST_WAITING", 2)
    async with engine_of(tmp_path, lanes=3) as engine:
        program, sums = engine.find("double"), dict[int, float]()

        async def one(job: Any, number: int) -> None:
            found = await job.run(program, {"x": np.full(3, number, "f")})
            sums[number] = float(found["y"].sum())

        async with engine.jobs.begun("job", owner="one") as job:
            await job.each(range(9), lambda number: one(job, number))
            with pytest.raises(Overloaded, match="as many runs wait"):
                async with engine.jobs.begun("job", owner="one"):
                    pass
        assert sums == {number: 6.0 * number for number in range(9)}
        assert outcomes(engine) == {"done": 1}
        assert engine.executor._places.held == 0


async def test_more_urgent_work_goes_between_two_runs(tmp_path: Path) -> None:
    async with engine_of(tmp_path) as engine:
        program, order = engine.find("double"), list[str]()
        work = asyncio.ensure_future(engine.run(engine.find("endless"), LOOP))
        await until(lambda: engine.executor.running)

        async def page() -> None:
            async with engine.jobs.begun("job", urgency=BATCH) as job:
                for number in range(3):
                    await job.run(program, ONES)
                    order.append(f"batch {number}")
                    if not number:
                        waiting.append(asyncio.ensure_future(single()))
                        await asyncio.sleep(0)

        async def single() -> None:
            await engine.run(program, ONES)
            order.append("single")

        waiting = [asyncio.ensure_future(page())]
        await until(lambda: len(engine.executor.queue))
        work.cancel()
        await waiting[0]
        await asyncio.gather(*waiting)
        assert order == ["batch 0", "single", "batch 1", "batch 2"]


async def test_a_jobs_runs_keep_its_arrival(tmp_path: Path) -> None:
    """A later run of a job that came first is before a job that came after it."""
    async with engine_of(tmp_path) as engine:
        program, order = engine.find("double"), list[str]()

        async def page(name: str) -> None:
            async with engine.jobs.begun("job") as job:
                for _ in range(2):
                    await job.run(program, ONES)
                order.append(name)

        work = asyncio.ensure_future(engine.run(engine.find("endless"), LOOP))
        await until(lambda: engine.executor.running)
        first = asyncio.ensure_future(page("first"))
        await until(lambda: len(engine.executor.queue) == 1)
        second = asyncio.ensure_future(page("second"))
        await until(lambda: len(engine.executor.queue) == 2)
        work.cancel()
        await asyncio.gather(first, second)
        assert order == ["first", "second"]


async def test_the_price_of_a_job_is_the_sum_of_its_runs(tmp_path: Path) -> None:
    async with engine_of(tmp_path) as engine:
        program = engine.find("double")
        for _ in range(2):
            program.prices.observe(SHAPES, 1.0)
        async with engine.jobs.begun("job", timeout=3.5) as job:
            expected = [job.expect(program, SHAPES) for _ in range(3)]
            assert job.owed == 3.0
            assert (await job.run(program, ONES, expected[0]))["y"].sum() == 6
            assert job.owed == 2.0

        async def too_long() -> None:
            async with engine.jobs.begun("job", timeout=2.5) as job:
                expected = [job.expect(program, SHAPES) for _ in range(3)]
                await job.run(program, ONES, expected[0])

        with pytest.raises(DeadlineMissed, match=r"a run takes .* and those after it .* ms") as one:
            await too_long()
        assert one.value.status == 504
        assert outcomes(engine) == {"done": 1, "deadline_missed": 1}


async def test_wrong_prices_do_not_refuse_jobs_for_ever(tmp_path: Path) -> None:
    """No run alone takes half of the time, and all together take too long."""
    async with engine_of(tmp_path) as engine:
        program, wide = engine.find("double"), (("x", (4,)),)
        feeds = {SHAPES: ONES, wide: {"x": np.ones(4, "f")}}
        for shapes in feeds:
            for _ in range(2):
                program.prices.observe(shapes, 20.0)

        async def page() -> None:
            async with engine.jobs.begun("job", timeout=100.0) as job:
                runs = [(one, job.expect(program, one)) for one in 5 * list(feeds)]
                for shapes, expected in runs:
                    await job.run(program, feeds[shapes], expected)

        for _ in range(9):
            with suppress(DeadlineMissed):
                await page()
        assert outcomes(engine)["done"] >= 1
        assert all((program.prices.usual(shapes) or 0) < 11 for shapes in feeds)


async def test_larger_runs_are_not_the_price_of_announced_ones(tmp_path: Path) -> None:
    async with engine_of(tmp_path) as engine:
        program = engine.find("double")
        for _ in range(2):
            program.prices.observe((("x", (9600,)),), 20.0)
        async with engine.jobs.begun("job", timeout=100.0) as job:
            for expected in [job.expect(program, SHAPES) for _ in range(10)]:
                await job.run(program, ONES, expected)
        assert program.prices.usual((("x", (9600,)),)) == 20.0


async def test_lanes_share_the_price(tmp_path: Path) -> None:
    async with engine_of(tmp_path, lanes=2) as engine:
        program = engine.find("double")
        for _ in range(2):
            program.prices.observe(SHAPES, 1.0)
        async with engine.jobs.begun("job", timeout=2.6) as job:
            expected = [job.expect(program, SHAPES) for _ in range(3)]
            await job.run(program, ONES, expected[0])


async def test_a_job_whose_caller_leaves_ends(tmp_path: Path) -> None:
    async with engine_of(tmp_path, lanes=2) as engine:
        program, loop = engine.find("double"), engine.find("endless")

        async def page() -> None:
            async with engine.jobs.begun("job") as job:
                await job.run(program, ONES)
                await job.each(range(9), lambda _: job.run(loop, LOOP))  # type: ignore[arg-type]

        work = asyncio.ensure_future(page())
        await until(lambda: engine.executor.running == 2)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        await until(lambda: not engine.executor.running)
        assert (len(engine.executor.queue), engine.executor._places.held) == (0, 0)
        assert outcomes(engine) == {"left": 1}


async def test_the_deadline_is_over_all_runs(tmp_path: Path) -> None:
    async with engine_of(tmp_path, lanes=2) as engine:
        loop = engine.find("endless")
        for work in (
            lambda job: job.run(loop, LOOP),
            lambda job: job.each(range(9), lambda _: job.run(loop, LOOP)),
            lambda job: asyncio.sleep(100),
        ):
            with pytest.raises(DeadlineMissed, match="at its deadline"):
                async with engine.jobs.begun("job", timeout=0.1) as job:
                    await work(job)
        await until(lambda: not engine.executor.running)
        assert outcomes(engine) == {"deadline_missed": 3}
        assert engine.executor._places.held == 0


async def test_an_error_of_one_run_ends_the_others(tmp_path: Path) -> None:
    async with engine_of(tmp_path, lanes=2) as engine:
        loop, double = engine.find("endless"), engine.find("double")

        async def one(job: Any, wrong: bool) -> None:
            await (job.run(double, {"z": np.ones(1)}) if wrong else job.run(loop, LOOP))

        with pytest.raises(InvalidRequest, match="input 'z' is not known"):
            async with engine.jobs.begun("job") as job:
                await job.each([False, True, False], lambda wrong: one(job, wrong))
        await until(lambda: not engine.executor.running)
        assert outcomes(engine) == {"invalid_request_error": 1}


async def test_a_programs_fault_is_not_the_clients(tmp_path: Path) -> None:
    async with engine_of(tmp_path) as engine:
        with pytest.raises(EngineFault, match=r"double does not run on a picture: .* the shape"):
            async with engine.jobs.begun("job") as job:
                await run_step(job, engine.find("double"), np.ones((1, 3), np.float32))
        assert outcomes(engine) == {"engine_fault": 1}


async def test_turns_go_to_the_earliest_deadline() -> None:
    turns, order = JobTurns(1), list[int]()

    async def one(number: int, deadline: float) -> None:
        await turns.take(TimedWork(number, 0.0, deadline=deadline))
        order.append(number)

    await one(0, 1.0)
    waiting = [
        asyncio.ensure_future(one(at, due)) for at, due in ((1, math.inf), (2, 9.0), (3, 5.0))
    ]
    await asyncio.sleep(0)
    waiting[2].cancel()
    await asyncio.sleep(0)
    for _ in range(2):
        turns.give()
        await asyncio.sleep(0)
    assert order == [0, 2, 1]
    turns.give()
    late = asyncio.ensure_future(one(4, 1.0))
    await asyncio.sleep(0)
    late.cancel()  # Its turn has come, and nobody takes it.
    await asyncio.gather(late, *waiting, return_exceptions=True)
    turns.give()
    assert (turns._free, turns._waiting) == (1, {})


async def test_jobs_that_leave_leave_nothing() -> None:
    turns = JobTurns(2)
    for number in range(2):
        await turns.take(TimedWork(number, 0.0))
    for number in range(2, 200):
        left = asyncio.ensure_future(turns.take(TimedWork(number, 0.0), str(number % 3)))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait({left})
    assert turns._waiting == {}


async def test_owners_take_turns() -> None:
    """One of a hundred jobs with short deadlines takes neither all turns nor all that come."""
    turns, order, numbers = JobTurns(3), list[str](), count()

    async def one(owner: str, deadline: float) -> None:
        await turns.take(TimedWork(next(numbers), 0.0, deadline=deadline), owner)
        order.append(owner)

    waiting = [asyncio.ensure_future(one("many", 1.0)) for _ in range(100)]
    await asyncio.sleep(0)
    assert order == ["many", "many"], "one turn is left to others"
    waiting += [asyncio.ensure_future(one(name, 9.0)) for name in ("few", "other", "few")]
    await asyncio.sleep(0)
    assert order == ["many", "many", "few"]
    for owner, after in (("few", "other"), ("many", "few"), ("few", "many")):
        turns.give(owner)
        await asyncio.sleep(0)
        assert order.pop() == after
    for left in waiting:
        left.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    alone = [asyncio.ensure_future(one("", math.inf)) for _ in range(3)]
    while turns._free < 3:
        turns.give(next(iter(turns._begun)))
    await asyncio.sleep(0)
    assert order[3:] == ["", "", ""], "without keys, one client may have them all"
    await asyncio.gather(*alone)


async def test_jobs_that_prepare_hold_up_nobody(tmp_path: Path) -> None:
    async with engine_of(tmp_path) as engine:
        most, preparing, go = engine.executor.lanes.count + 2, list[int](), asyncio.Event()

        async def prepare() -> None:
            preparing.append(1)
            await go.wait()

        async def page(timeout: float = math.inf) -> None:
            async with engine.jobs.begun("job", prepare=prepare, timeout=timeout) as job:
                await job.run(engine.find("double"), ONES)

        pages = [asyncio.ensure_future(page()) for _ in range(2 * most)]
        async with engine.jobs.begun("job") as job:
            await job.run(engine.find("double"), ONES)
        assert len(preparing) == most, "what is prepared and waits is bounded"
        with pytest.raises(DeadlineMissed):
            await page(0.05)
        go.set()
        await asyncio.gather(*pages)
        assert outcomes(engine) == {"done": 2 * most + 1, "deadline_missed": 1}
        assert [one._free for one in engine.jobs._prepared + engine.jobs._turns] == [most] * 6


async def test_jobs_that_wait_are_told_that_the_server_ends(tmp_path: Path) -> None:
    async with engine_of(tmp_path) as engine:
        turns = engine.executor.lanes.count + 2

        async def hold() -> None:
            async with engine.jobs.begun("job"):
                await asyncio.sleep(100)

        held = [asyncio.ensure_future(hold()) for _ in range(turns + 1)]
        await asyncio.sleep(0)
        engine.jobs.close()
        with pytest.raises(ShuttingDown):
            await held[-1]
        for one in held:
            one.cancel()
        await asyncio.gather(*held, return_exceptions=True)
