"""The time of each operator of a step, for who profiles.

A step that runs operator by operator (`CallByCall`) is watched: a mark of the device's clock before
and behind each operator. A GPU's marks are events in its stream, so what is between two of them is
the kernels' time and, where the host launches more slowly than they run, the wait for the launch:
an eager step's time, not a replayed graph's. The CPU's library times its own (`cpu.timing`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Timed(NamedTuple):
    """One operator of one step."""

    name: str
    shape: tuple[int, int] | None
    """(out, in) of a product."""
    decodes: bool
    """Did every entry of the step compute one token?"""
    seconds: float


class Clock(Protocol):
    """A device's clock."""

    def mark(self) -> Any:
        """Now, or when the device comes to it."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks; waits until the device has come to the last one."""
        ...


class HostClock:
    """For operators that are done when their call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first


class DeviceClock:
    """Events in the current stream of a CUDA device."""

    def mark(self) -> Any:
        import torch  # Local: whoever profiles the CPU's kernels needs none.

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class OperatorTimes:
    """What ran while steps were watched."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._decodes = False
        self._marked: list[tuple[Timed, Any, Any]] = []

    def begin(self, *, decodes: bool) -> None:
        """A step begins."""
        self._decodes = decodes

    def run(self, name: str, shape: tuple[int, int] | None, operator: Callable[[], T]) -> T:
        """What the operator gives."""
        first = self._clock.mark()
        found = operator()
        one = Timed(name, shape, self._decodes, 0.0)
        self._marked.append((one, first, self._clock.mark()))
        return found

    def timed(self) -> list[Timed]:
        """All operators so far, in their order. Waits for the device."""
        seconds = self._clock.seconds
        return [one._replace(seconds=seconds(first, last)) for one, first, last in self._marked]


def operator_times(device: str) -> OperatorTimes:
    """By the clock of "cpu" or "cuda"."""
    return OperatorTimes(DeviceClock() if device == "cuda" else HostClock())
