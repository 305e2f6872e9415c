"""Marks around operators: of the host, and of a device that comes to them later."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.graph import KINDS
from headrace.kernels.timing import DeviceClock, OperatorTimes, Timed

torch = pytest.importorskip("torch")


class Stream:
    """A device that does what is queued when somebody waits for it."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.now = 0.0

    def launch(self, milliseconds: float) -> None:
        self.queued.append(milliseconds)

    def wait(self) -> None:
        for each in self.queued:
            if isinstance(each, Event):
                each.at = self.now
            else:
                self.now += each
        self.queued.clear()


class Event:
    stream: Stream

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self) -> None:
        self.stream.queued.append(self)

    def synchronize(self) -> None:
        self.stream.wait()

    def elapsed_time(self, last: Event) -> float:
        assert self.at is not None
        assert last.at is not None
        return last.at - self.at


def test_kernels_are_timed_by_events_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits while a step is launched; each operator has its own kernels' time."""
    stream = Event.stream = Stream()
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=Event))
    times = OperatorTimes(DeviceClock())
    for decodes in (False, True):
        times.begin(decodes=decodes)
        assert times.run("linear", (8, 4), lambda: stream.launch(3.0)) is None
        times.run("sample", None, lambda: stream.launch(0.5))
    assert stream.now == 0
    assert times.timed() == [
        Timed("linear", (8, 4), False, 0.003),
        Timed("sample", None, False, 0.0005),
        Timed("linear", (8, 4), True, 0.003),
        Timed("sample", None, True, 0.0005),
    ]


def test_what_an_operator_gives_is_passed_on() -> None:
    ticks = count()
    clock = SimpleNamespace(mark=lambda: next(ticks), seconds=lambda first, last: last - first)
    times = OperatorTimes(clock)
    assert times.run("add", None, lambda: 7) == 7
    assert times.timed() == [Timed("add", None, False, 1.0)]
    with pytest.raises(ValueError, match="own"):
        times.run("add", None, lambda: int("its own"))
    assert len(times.timed()) == 1


def test_every_record_has_the_name_of_an_operator() -> None:
    """A profile of a layout's ranks ended in a KeyError at their first hand-over."""
    from headrace.kernels.cpu.records import CODES
    from headrace.kernels.cpu.timing import NAMES

    own = [
        "around",
        "gate_up",
        "handover",
        "head",
        "lora",
        "quantise",
        "recurrence",
        "sample",
        "softcap",
    ]
    assert set(NAMES) == set(CODES.values())
    assert set(NAMES.values()) - KINDS == set(own)
