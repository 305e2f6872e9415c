"""A loop that waits for a resource sleeps until it is woken, and does not poll."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.errors import EngineDead
from headrace.base.request import StepStats
from headrace.base.workeroptions import WorkerOptions
from headrace.dist.channel import Channel, address
from headrace.dist.wake import Wake
from headrace.engine import messages, process
from headrace.engine.process import serve
from headrace.engine.ranks import multiproc
from headrace.engine.ranks.multiproc import MultiprocExecutor
from headrace.loader import open_model


class Waiting:
    """A core with work that cannot run before `ready`."""

    def __init__(self, wake: Wake) -> None:
        self.stalled = True
        self.executor = SimpleNamespace(wake=wake)
        self.stats = StepStats()
        self.has_work = True
        self.ready = False
        self.turns = 0
        self.done = threading.Event()

    def step(self) -> list[Any]:
        self.turns += 1
        if self.ready:
            self.has_work = self.stalled = False
            self.stats = StepStats(step=1)
            self.done.set()
        return []


def test_a_ring_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "BEAT_SECONDS", 1e6)
    where = address(tmp_path, "engine")
    parent = Channel(where, messages.FromEngine, bind=True)
    child = Channel(where, messages.ToEngine, bind=False)
    wake = Wake()
    core = Waiting(wake)
    models: Any = SimpleNamespace(
        core=core, built={}, desks={}, lender=None, busy=False, tidy=list, turn=list, step=core.step
    )
    thread = threading.Thread(target=serve, args=(child, models, None), daemon=True)
    thread.start()
    try:
        core.ready = True
        wake.ring()
        wake.ring()
        assert core.done.wait(300)
        assert core.turns <= 2
    finally:
        parent.receive(0.0)
        parent.send(messages.Stop())
        thread.join(300)
        parent.close()
        child.close()
        wake.close()
    assert not thread.is_alive()


@pytest.fixture
def executor(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An executor of a worker whose grammars are done when another, called "release", is asked
    for."""
    monkeypatch.setattr(multiproc, "_ASK_AGAIN", 1e6)
    files = open_model(options["model"], offline=True)
    it = MultiprocExecutor(files, WorkerOptions(), "engine_fakes:load_compiling")
    try:
        it.load()
        yield it
    finally:
        it.close()


def test_a_worker_process_says_when_a_grammar_is_done(executor: MultiprocExecutor) -> None:
    """Two questions in all, and every wait is ended by the worker."""
    bell = executor.wake
    sent: list[Any] = []
    send = executor._channel.send
    executor._channel.send = lambda message: (sent.append(message), send(message))  # type: ignore[method-assign,func-returns-value]

    def rung() -> None:
        assert select.select([bell], [], [], 300)[0], "nobody rings"
        assert bell.clear()

    assert not executor.prepare_grammar("one")
    rung()  # It is not done.
    for _ in range(100):
        assert not executor.prepare_grammar("one")
    assert len(sent) == 1
    assert not executor.prepare_grammar("release")
    while not executor._prepared:  # The answer to that, and then that another is done.
        rung()
    while executor._compiling:
        rung()
    assert not executor.prepare_grammar("one")
    rung()
    assert executor.prepare_grammar("one")
    assert [message.grammar for message in sent] == ["one", "release", "one"]
    assert not bell.clear(), "nothing is left unheard"


def test_a_worker_that_dies_between_steps_rings(executor: MultiprocExecutor) -> None:
    bell = executor.wake
    os.kill(executor.end.pid, signal.SIGKILL)
    assert select.select([bell], [], [], 300)[0]
    with pytest.raises(EngineDead, match="worker process"):
        bell.clear()


def test_a_ring_before_the_wait_is_heard_once() -> None:
    wake = Wake()
    for _ in range(100_000):
        wake.ring()
    assert wake.clear()
    assert not wake.clear()
    assert wake._heard.read(1) is None, "nothing is left, and nobody waits for it"
    wake.close()
    wake.ring()
