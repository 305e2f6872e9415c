"""A loop that waits for a resource sleeps until it is woken, and does not poll."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.request import StepStats
from headrace.dist.channel import Channel, address
from headrace.dist.wake import Wake
from headrace.engine import messages
from headrace.engine.process import serve


class Waiting:
    """A core with work that cannot run before `ready`."""

    def __init__(self, wake: Wake | None) -> None:
        self.executor = SimpleNamespace(wake=wake)
        self.stats = StepStats()
        self.has_work = True
        self.ready = False
        self.turns = 0
        self.done = threading.Event()

    def turn(self) -> list[Any]:
        self.turns += 1
        if self.ready:
            self.has_work = False
            self.stats = StepStats(step=1)
            self.done.set()
        return []


@pytest.mark.parametrize("watched", [True, False])
def test_a_ring_ends_the_wait(tmp_path: Path, watched: bool) -> None:
    where = address(tmp_path, "engine")
    parent = Channel(where, messages.FromEngine, bind=True)
    child = Channel(where, messages.ToEngine, bind=False)
    wake = Wake()
    core = Waiting(wake if watched else None)
    operator: Any = SimpleNamespace(asleep=False)
    thread = threading.Thread(target=serve, args=(child, core, operator), daemon=True)
    thread.start()
    try:
        time.sleep(0.3)
        if watched:
            assert core.turns <= 3, "it sleeps"
        core.ready = True
        wake.ring()
        wake.ring()
        assert core.done.wait(30)
    finally:
        parent.receive(0.0)
        parent.send(messages.Stop())
        thread.join(30)
        parent.close()
        child.close()
        wake.close()
    assert not thread.is_alive()


def test_a_ring_before_the_wait_is_heard_once() -> None:
    wake = Wake()
    for _ in range(100_000):
        wake.ring()
    wake.clear()
    with pytest.raises(BlockingIOError):
        wake._heard.recv(1)
    wake.close()
    wake.ring()
