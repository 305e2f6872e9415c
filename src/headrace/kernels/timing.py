"""Time of each operator of a step, for profiling.

In a step that runs operator by operator (`CallByCall`), the device's clock is marked before and
after each operator. A GPU's marks are events in its stream. So the time between two of them is the
kernels' time and, if the host launches more slowly than they run, the wait for the launch: an eager
step's time, not a replayed graph's. The CPU's library times its own (`cpu.timing`).
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
    """Whether every entry of the step computed one token."""
    seconds: float


class Clock(Protocol):
    """A device's clock."""

    def mark(self) -> Any:
        """Mark the current time, or the time when the device comes to it."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """Return the time between two marks; wait until the device has come to the last one."""
        ...


class HostClock:
    """Clock for operators that are done when their call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first


class DeviceClock:
    """Events in the current stream of a CUDA device."""

    def mark(self) -> Any:
        import torch  # Local: profiling the CPU's kernels needs no torch.

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class OperatorTimes:
    """Operators that ran while steps were timed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._decodes = False
        self._marked: list[tuple[Timed, Any, Any]] = []

    def begin(self, *, decodes: bool) -> None:
        """Begin a step."""
        self._decodes = decodes

    def run(self, name: str, shape: tuple[int, int] | None, operator: Callable[[], T]) -> T:
        """Run the operator, mark its time, and return its result."""
        first = self._clock.mark()
        found = operator()
        one = Timed(name, shape, self._decodes, 0.0)
        self._marked.append((one, first, self._clock.mark()))
        return found

    def timed(self) -> list[Timed]:
        """Return all operators so far, in their order. Waits for the device."""
        seconds = self._clock.seconds
        return [one._replace(seconds=seconds(first, last)) for one, first, last in self._marked]


def operator_times(device: str) -> OperatorTimes:
    """Make a record by the clock of "cpu" or "cuda"."""
    return OperatorTimes(DeviceClock() if device == "cuda" else HostClock())
