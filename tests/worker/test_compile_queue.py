"""Grammars of many clients, compiled in a few threads: what is asked for, in a fair order."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from headrace.worker.compile_queue import (
    AT_FIRST,
    FORGET,
    LEASE,
    NICE,
    OVERDUE,
    SMALL,
    CompileQueue,
)


class Held:
    """A compiler whose jobs run until they are let go, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[str] = []
        self.free: dict[str, threading.Event] = {}
        self.queue = CompileQueue(self.compile, clock=lambda: self.now)

    def compile(self, source: str) -> str:
        self.begun.append(source[:8].strip("."))
        self.free.setdefault(source, threading.Event()).wait(300)
        if source.startswith("bad"):
            raise ValueError(source)
        return source

    def let_go(self, source: str) -> None:
        self.free.setdefault(source, threading.Event()).set()


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.queue.close()
    for event in list(held.free.values()):
        event.set()


def huge(name: str) -> str:
    return name + "." * SMALL


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def test_a_small_one_passes_large_ones(held: Held) -> None:
    for number in range(8):
        held.queue.submit(huge(f"h{number}"), "a")
    until(lambda: held.begun == ["h0"])  # One thread is kept for what is small.
    small = held.queue.submit("small", "a")
    held.let_go("small")
    assert small.result(120) == "small"


def test_the_owner_goes_first_that_used_least(held: Held) -> None:
    held.queue.submit(huge("a0"), "a")
    until(lambda: held.begun == ["a0"])
    for number in range(1, 4):
        held.queue.submit(huge(f"a{number}"), "a")
    held.queue.submit(huge("longer-b0"), "b")
    held.now = 1.0
    held.let_go(huge("a0"))
    until(lambda: held.begun == ["a0", "longer-b"])


def test_what_nobody_asks_for_is_not_begun(held: Held) -> None:
    held.queue.submit(huge("h0"), "a")
    until(lambda: held.begun == ["h0"])
    left = held.queue.submit(huge("left"), "a")
    held.queue.submit(huge("wanted-longer"), "a")
    held.now = LEASE + 0.1
    held.queue.ask(huge("wanted-longer"))
    assert held.now > OVERDUE  # What runs is overdue: another thread stands in for it.
    until(lambda: held.begun == ["h0", "wanted-l"])
    held.now = FORGET + 0.1
    held.let_go(huge("wanted-longer"))
    until(left.cancelled)
    assert held.begun == ["h0", "wanted-l"]


def test_a_fault_is_its_own(held: Held) -> None:
    futures = [held.queue.submit(name, "a") for name in ("bad", "good")]
    held.let_go("bad")
    held.let_go("good")
    with pytest.raises(ValueError, match="bad"):
        futures[0].result(120)
    assert futures[1].result(120) == "good"
    assert len(held.queue._threads) == AT_FIRST


def test_closing_waits_for_nothing(held: Held) -> None:
    runs = held.queue.submit(huge("runs"), "a")
    until(lambda: held.begun == ["runs"])
    waits = [held.queue.submit(huge(f"w{number}"), "a") for number in range(3)]
    held.queue.close()
    assert all(future.cancelled() for future in waits)
    assert not runs.done()


def own_niceness(_: str = "") -> int:
    """The niceness of the calling thread, which the system keeps apart from its process's."""
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness of a thread is Linux's")
def test_large_ones_stand_back_from_whoever_asks() -> None:
    """A service that is started with `nice 15` had them at 10, before everything else of it."""
    seen: list[tuple[int, int]] = []

    def nicer_service() -> None:
        mine = min(19, own_niceness() + 5)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), mine)
        queue = CompileQueue(own_niceness)
        seen.append((mine, queue.submit(huge("large"), "a").result(60)))
        queue.close()

    thread = threading.Thread(target=nicer_service)
    thread.start()
    thread.join()
    [(mine, large)] = seen
    assert large == min(19, mine + NICE)
