"""Supervision of an engine process that dies, hangs, cannot start, or loses its parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crawling_worker import CRAWLING
from engine_fakes import (
    CRASH,
    CRAWL,
    FAKE,
    HANG,
    HUNG,
    LET_GO,
    LOCK,
    RAISE,
    SICK_THREAD,
    continuation,
)
from engine_waits import age, stopped, until

from headrace.base.errors import EngineDead, EngineFault, Overloaded
from headrace.base.sampling import SamplingParams
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.supervision import Supervision
from headrace.engine.clients.supervisor import Supervisor
from headrace.engine.messages import Busy
from headrace.engine.spawn import ORPHANED
from tiny import bytewise


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


async def ready_again(engine: AsyncEngine, restarts: int = 1) -> None:
    await until(lambda: engine.health().ready and engine.health().restarts >= restarts, "ready")


def metric(engine: AsyncEngine, name: str, **labels: str) -> float | None:
    return engine.registry.get_sample_value(
        name, {"model_name": engine.model_name, "engine": "0", **labels}
    )


async def served(engine: AsyncEngine) -> None:
    answer = await engine.generate([65, 66], greedy(12))
    assert answer.outputs[0].token_ids == continuation([65, 66], 12)
    report = await engine.inspect()
    assert (report.running, report.kv_usage, report.integrity) == (0, 0.0, "")


async def test_a_thread_that_ends_is_shown_and_counted(
    options: dict[str, Any], supervision: Supervision, notes: Path
) -> None:
    async with await AsyncEngine.start(
        worker=SICK_THREAD, supervision=supervision, **options
    ) as engine:
        await until(lambda: not engine.health().ready, "unready")
        health = engine.health()
        assert health.alive
        assert health.reason == "sick does not run: ValueError: the thread is sick"
        await served(engine)
        (notes / LET_GO).touch()
        await until(lambda: engine.health().ready, "ready")
        assert (metric(engine, "headrace:failures_total", kind="thread") or 0) >= 1


async def test_kill_under_64_streams(options: dict[str, Any], supervision: Supervision) -> None:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        streams = [engine.submit([65, CRAWL, i], greedy(300)) for i in range(64)]
        firsts = await asyncio.gather(*(anext(stream) for stream in streams))
        assert all(first.token_ids for first in firsts)
        first_pid = engine.engine_pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)

        async def rest(stream: Any) -> Exception | None:
            try:
                async for _ in stream:
                    pass
            except EngineDead as error:
                return error
            return None

        errors = await asyncio.gather(*(rest(stream) for stream in streams))
        for error in errors:
            assert isinstance(error, EngineDead)
            assert "SIGKILL" in error.message
            assert error.retry_after is not None
        assert not engine.health().ready
        assert engine.health().alive
        with pytest.raises(Overloaded) as caught:
            engine.submit([65], greedy(5))
        assert caught.value.retry_after is not None
        await ready_again(engine)
        assert engine.engine_pid != first_pid
        await served(engine)
        assert metric(engine, "headrace:failures_total", kind="death") == 1
        assert metric(engine, "headrace:engine_restarts_total") == 1
        assert metric(engine, "vllm:request_success_total", finished_reason="error") == 64
        dump = engine.last_dump
        assert dump is not None
        record = json.loads(dump.read_text())
        assert record["kind"] == "death"
        assert record["steps"][-1]["running"] == 64


async def test_the_log_says_it_before_anything_else_is_done(
    options: dict[str, Any],
    supervision: Supervision,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before: list[str] = []
    told = Supervisor._bury

    def bury(of: Supervisor) -> None:
        before.extend(record.getMessage() for record in caplog.records)
        told(of)

    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        monkeypatch.setattr(Supervisor, "_bury", bury)
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        await until(lambda: engine.health().restarts, "a restart")
        assert before == ["engine process was ended by SIGKILL"]


async def test_a_crash_inside_a_step_is_seen_in_the_dump(
    options: dict[str, Any], supervision: Supervision
) -> None:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        with pytest.raises(EngineDead, match="exited with code 9"):
            await engine.generate([65, CRASH], greedy(5))
        assert engine.last_dump is not None
        last = json.loads(engine.last_dump.read_text())["steps"][-1]
        assert (last["state"], last["entries"], last["tokens"]) == ("submitted", 1, 2)
        await ready_again(engine)
        await served(engine)


@pytest.mark.parametrize("token", [HANG, LOCK])
async def test_a_hung_step_is_ended_and_shows_its_stack(
    options: dict[str, Any], supervision: Supervision, token: int, notes: Path
) -> None:
    patience = replace(supervision, stacks=120.0)
    async with await AsyncEngine.start(worker=FAKE, supervision=patience, **options) as engine:
        waiting = engine.submit([66, CRAWL], greedy(400))
        await anext(waiting)
        culprit = asyncio.create_task(engine.generate([65, token], greedy(5)))
        await until((notes / f"{HUNG}{engine.engine_pid}").exists, "the step hangs")
        age(engine)
        with pytest.raises(EngineDead):
            async for _ in waiting:
                pass
        # It is given to the second engine too, and to no third.
        await until(lambda: len(list(notes.glob(f"{HUNG}*"))) == 2, "the second hangs")
        age(engine)
        with pytest.raises(EngineDead, match="silent"):
            await culprit
        assert engine.last_dump is not None
        record = json.loads(engine.last_dump.read_text())
        assert record["kind"] == "hang"
        assert any("engine_fakes.py" in line and "execute" in line for line in record["stacks"])
        await ready_again(engine)
        await served(engine)
        assert metric(engine, "headrace:failures_total", kind="hang") == 2
        assert metric(engine, "headrace:requests_retried_total") == 1


async def test_a_stopped_process_is_a_hung_one(
    options: dict[str, Any], supervision: Supervision
) -> None:
    """SIGSTOP: no thread of the engine process could have noticed."""
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        await stopped(engine)
        age(engine)
        await ready_again(engine)
        await served(engine)


async def test_our_own_pause_is_not_taken_for_a_hang(
    options: dict[str, Any], supervision: Supervision
) -> None:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        pid, channel = engine.engine_pid, engine._supervisor._channel
        assert channel is not None
        assert channel._socket is not None
        age(engine)  # The event loop stands still for longer than the limit,
        assert select.select([channel._socket], [], [], 120)[0]  # and meanwhile it beats.
        aged = channel.received_at
        await asyncio.sleep(1.5)
        assert channel.received_at > aged + 1e5
        assert engine.engine_pid == pid
        assert engine.health().restarts == 0
        await served(engine)


async def test_a_failing_step_ends_its_requests_alone(
    options: dict[str, Any], supervision: Supervision
) -> None:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        pid = engine.engine_pid
        with pytest.raises(EngineFault, match="the fake raises"):
            await engine.generate([65, RAISE], greedy(5))
        await served(engine)
        assert engine.engine_pid == pid
        assert metric(engine, "headrace:failures_total", kind="step") == 1


async def test_a_worker_that_fails_every_step_is_replaced(
    options: dict[str, Any], supervision: Supervision
) -> None:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        for _ in range(3):
            with pytest.raises((EngineFault, EngineDead)):
                await engine.generate([65, RAISE], greedy(5))
        await ready_again(engine)
        await served(engine)


async def test_a_restart_that_fails_is_tried_again_and_liveness_ends(
    options: dict[str, Any], tmp_path: Path
) -> None:
    own = {**options, "model": str(bytewise.make(tmp_path / "own"))}
    patience = Supervision(hang=300.0, back_off=0.02, back_off_most=0.05, give_up=3)
    engine = await AsyncEngine.start(
        worker="engine_fakes:load_after_failures", supervision=patience, **own
    )
    try:
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        await until(lambda: not engine.health().alive, "given up")
        health = engine.health()
        assert not health.alive
        assert not health.ready
        assert "the device is gone" in health.reason
        (Path(own["model"]) / "started-once").unlink()
        await ready_again(engine, restarts=3)
        assert engine.health().alive
        await served(engine)
    finally:
        await engine.close()


async def test_a_first_start_that_fails_is_an_error_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(EngineFault, match="No module named"):
        await AsyncEngine.start(worker="no_such_module:load", **options)


PARENT = """
import asyncio, sys
from headrace import SamplingParams
from headrace.engine.clients.async_engine import AsyncEngine

async def main():
    engine = await AsyncEngine.start(worker="engine_fakes:load", **{options!r})
    print(engine.engine_pid, flush=True)
    if {token}:
        stream = engine.submit([65, {token}], SamplingParams(max_tokens=3))
    await asyncio.sleep(600)

asyncio.run(main())
"""


def gone(pid: int, within: float = 120.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("token", [0, LOCK])
@pytest.mark.parametrize("executor", ["inline", "multiproc"])
def test_no_process_outlives_its_parent(
    options: dict[str, Any], executor: str, token: int, notes: Path
) -> None:
    code = PARENT.format(options={**options, "executor": executor}, token=token)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        children = [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
        assert len(children) == (1 if executor == "multiproc" else 0)
        while token and not list(notes.glob(f"{HUNG}*")):
            time.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
        assert all(gone(child) for child in (pid, *children))


def test_ctrl_c_reaches_the_parent_only(options: dict[str, Any]) -> None:
    """A terminal sends SIGINT to the whole foreground group: the engine is in another."""
    code = PARENT.format(options=options, token=0)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert os.getpgid(pid) != os.getpgid(parent.pid)
        os.kill(pid, signal.SIGINT)  # Ignored even when it is sent to it directly.
        time.sleep(0.3)
        os.kill(pid, 0)
        os.killpg(parent.pid, signal.SIGINT)
        parent.wait(120)
        assert gone(pid)


async def test_unread_requests_go_to_the_next_engine(
    options: dict[str, Any], supervision: Supervision
) -> None:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        pid = await stopped(engine)  # Nothing can have been read.
        streams = [engine.submit([65, place], greedy(20)) for place in range(24)]
        os.kill(pid, signal.SIGKILL)

        async def read(stream: Any) -> list[int]:
            return [token async for delta in stream for token in delta.token_ids]

        answers = await asyncio.gather(*(read(stream) for stream in streams))
        assert answers == [continuation([65, place], 20) for place in range(24)]
        assert metric(engine, "headrace:requests_retried_total") == 24
        assert metric(engine, "vllm:request_success_total", finished_reason="error") == 0
        await served(engine)


async def test_whole_answers_survive_a_death_in_their_middle(
    options: dict[str, Any], supervision: Supervision, notes: Path
) -> None:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        answer = asyncio.create_task(engine.generate([65, CRAWL], greedy(400)))
        await until(lambda: any(life.generated for _, life in engine.in_work()), "begun")
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        (notes / LET_GO).touch()
        assert (await answer).outputs[0].token_ids == continuation([65, CRAWL], 400)
        assert metric(engine, "headrace:requests_retried_total") == 1


async def test_a_sampled_answer_comes_anew_as_it_was(
    supervision: Supervision, tiny: Path, notes: Path
) -> None:
    """Its seed is drawn once, where the request is resolved."""
    async with await AsyncEngine.start(
        model=str(tiny), threads=1, kernels="ref", supervision=supervision, worker=CRAWLING
    ) as engine:
        sampling = SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True, n=2)
        stream = engine.submit([65, 66, 67], sampling, whole=True)
        before: list[list[int]] = [[], []]
        while min(map(len, before)) < 5:
            delta = await anext(stream)
            before[delta.index] += delta.token_ids
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        (notes / LET_GO).touch()
        answer: list[list[int]] = [list(tokens) for tokens in before]
        voids: list[tuple[int, int]] = []
        async for delta in stream:
            if delta.void is not None:
                assert delta.void == len(answer[delta.index])
                before[delta.index], answer[delta.index] = answer[delta.index], []
                voids.append((delta.index, delta.void))
            answer[delta.index] += delta.token_ids
        assert sorted(index for index, _ in voids) == [0, 1]
        assert [len(tokens) for tokens in answer] == [400, 400]
        assert answer[0] != answer[1]
        for early, late in zip(before, answer, strict=True):
            assert late[: len(early)] == early
        assert metric(engine, "headrace:requests_retried_total") == 1


async def test_who_leaves_while_the_next_engine_starts_is_forgotten(
    options: dict[str, Any], supervision: Supervision
) -> None:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        pid = await stopped(engine)
        left, aborted = (engine.submit([65, place], greedy(20)) for place in range(2))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not engine.health().ready, "its death is seen")
        left.cancel()
        assert engine.abort(aborted.request_id)
        with pytest.raises(EngineDead):
            await anext(aborted)
        assert engine.in_work() == []
        await ready_again(engine)
        await served(engine)
        assert metric(engine, "headrace:requests_retried_total") == 0


async def test_a_silent_engine_is_not_ready(options: dict[str, Any], tmp_path: Path) -> None:
    patience = Supervision(late=1e3, hang=1e9, dumps=tmp_path)
    async with await AsyncEngine.start(worker=FAKE, supervision=patience, **options) as engine:
        assert engine.health().ready
        pid = await stopped(engine)
        age(engine, 500.0)
        assert engine.health().ready
        age(engine)
        health = engine.health()
        assert not health.ready
        assert health.alive
        assert "silent" in health.reason
        os.kill(pid, signal.SIGCONT)
        await ready_again(engine, restarts=0)
        assert engine.health().restarts == 0


async def test_a_step_that_was_announced_may_be_silent(
    options: dict[str, Any], tmp_path: Path
) -> None:
    patience = Supervision(late=1e3, hang=1e9, dumps=tmp_path)
    async with await AsyncEngine.start(worker=FAKE, supervision=patience, **options) as engine:
        pid = await stopped(engine)
        age(engine, 0.0)  # What it said before is heard: it would end the announcement.
        engine._supervisor._receive(Busy(1e4))
        age(engine, 5e3)
        assert engine.health().ready
        age(engine, 1e4)
        assert not engine.health().ready
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("what", ["process", "thread", "socket", "folder"])
async def test_a_start_that_cannot_even_begin_is_tried_again(
    options: dict[str, Any], supervision: Supervision, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process, no thread, no descriptor: a table that is full for a moment."""
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        tries = 0

        def refuses(*arguments: Any, **named: Any) -> Any:
            nonlocal tries
            tries += 1
            raise RuntimeError("can't start new thread") if what == "thread" else OSError(11, what)

        with monkeypatch.context() as patch:
            if what == "folder":
                shutil.rmtree(engine._supervisor._folder)
            else:
                names = {
                    "process": "headrace.engine.spawn.subprocess.Popen",
                    "thread": "headrace.engine.spawn.threading.Thread.start",
                    "socket": "headrace.engine.clients.supervisor.AsyncChannel",
                }
                patch.setattr(names[what], refuses)
            assert engine.engine_pid is not None
            os.kill(engine.engine_pid, signal.SIGKILL)
            wanted = {"folder": 0, "thread": 1}.get(what, 2)
            await until(lambda: tries >= wanted, "it was tried")
            assert engine.health().alive
        await ready_again(engine)
        await served(engine)
        failed = metric(engine, "headrace:failures_total", kind="start")
        assert (failed or 0) >= (1 if what in ("process", "socket") else 0)


async def test_a_full_process_table(options: dict[str, Any], supervision: Supervision) -> None:
    """With a control group of the system, as a container has one."""
    group = Path("/sys/fs/cgroup/pids") / f"headrace-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as refused:
        pytest.skip(f"no control group can be made here: {refused}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = SHORT_OF_PROCESSES.format(options=options)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(group)],
            capture_output=True,
            text=True,
            timeout=400,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["alive", "served"]
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


SHORT_OF_PROCESSES = """
import asyncio, os, signal, sys
from pathlib import Path
from headrace import SamplingParams
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.supervision import Supervision

group = Path(sys.argv[1])

async def main():
    engine = await AsyncEngine.start(
        worker="engine_fakes:load",
        supervision=Supervision(back_off=0.1, give_up=50),
        **{options!r},
    )
    (group / "cgroup.procs").write_text(str(os.getpid()))
    (group / "pids.max").write_text((group / "pids.current").read_text())
    os.kill(engine.engine_pid, signal.SIGKILL)
    while engine.health().restarts < 4:
        await asyncio.sleep(0.02)
    print("alive" if engine.health().alive and not engine.health().ready else "wrong")
    (group / "pids.max").write_text("max")
    while not engine.health().ready:
        await asyncio.sleep(0.02)
    answer = await engine.generate([65], SamplingParams(temperature=0.0, max_tokens=3))
    print("served" if len(answer.outputs[0].token_ids) == 3 else "wrong")
    await engine.close()

asyncio.run(main())
"""


async def test_a_supervisor_that_ends_is_seen(
    options: dict[str, Any], supervision: Supervision, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **options) as engine:
        first = engine.engine_pid
        assert first is not None

        def broken(*arguments: Any) -> None:
            raise ValueError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(engine._supervisor, "_dump", broken)
            os.kill(first, signal.SIGKILL)
            await until(lambda: engine.tasks.down, "the supervisor ended")
            assert engine.tasks.down == {"supervisor": "ValueError: a bug"}
            assert not engine.health().ready
        await ready_again(engine)
        await served(engine)
        assert not engine.tasks.down
        assert metric(engine, "headrace:failures_total", kind="task") == 1


@pytest.mark.parametrize("left", ["nothing", "its folder", "a socket that nobody hears"])
def test_an_engine_that_starts_after_its_parent_leaves_quietly(tmp_path: Path, left: str) -> None:
    folder = tmp_path / "folder"
    if left != "nothing":
        folder.mkdir()
    address = folder / "socket"
    if "socket" in left:
        with socket.socket(socket.AF_UNIX) as once:
            once.bind(str(address))
    # A lifeline that stays: it is not by its end that the process notices.
    theirs, ours = os.pipe()
    with open(theirs) as lifeline, open(ours, "w"):
        done = subprocess.run(
            [sys.executable, "-m", "headrace.engine.process", address, folder, "--worker", "none"],
            stdin=lifeline,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == ORPHANED
    assert done.stderr == ""
