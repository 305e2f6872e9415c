"""The memory plan, checked against the device; a step's own need is measured (`step_memory`).

Before the KV pool is made, the largest step runs once on a pool of a few null blocks, and the
largest graphs are captured on it. So the plan counts measured bytes instead of a formula's. After
the start the device is asked again. A difference of more than `SLACK` is logged with its numbers;
if the largest step has no room, the start is refused (DESIGN.md, promise 4).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from ..base.errors import DoesNotFit

log = logging.getLogger("headrace.worker")

SLACK = 0.05
"""Share of the planned bytes by which the device may differ."""


class DeviceMemory(Protocol):
    """Queries to a device. Sizes in bytes."""

    def free(self) -> int:
        """Return the bytes that any process could allocate now, after torch's cache was emptied."""
        ...

    def watch(self) -> None:
        """Begin to record the peak of tensor memory."""
        ...

    def growth(self) -> int:
        """Return the peak of allocated bytes since `watch`, minus those allocated then."""
        ...


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory that steps take in addition to weights and KV."""

    step_bytes: int
    """Bytes of tensors alive in the largest step, at most."""
    graph_bytes: int
    """Bytes of all captured graphs, extrapolated from a few of them."""


def check(memory: DeviceMemory, before: int, planned: dict[str, int], step_bytes: int) -> None:
    """Check the plan against the device; `before` bytes were free when weights were loaded.

    `planned`: bytes allocated since, by part. Logs a warning, or raises `DoesNotFit`.
    """
    free = memory.free()
    used, wanted = before - free, sum(planned.values())
    parts = ", ".join(f"{name} {_size(size)}" for name, size in planned.items())
    if free < step_bytes:
        raise DoesNotFit(
            f"the device has {_size(free)} left beside {parts}, and the largest step takes "
            f"{_size(step_bytes)}; what would help: --kv-memory "
            f"{max(1, (planned.get('KV pool', 0) - (step_bytes - free)) // 2**20)}MiB, or smaller "
            "--step-tokens or --max-sequences",
            param="kv_memory",
        )
    if abs(used - wanted) > SLACK * max(wanted, 1) + 2**28:
        log.warning(
            "the device says that %s are in use since the weights were loaded; planned were %s "
            "(%s), %+.0f %%",
            _size(used),
            _size(wanted),
            parts,
            100 * (used - wanted) / max(wanted, 1),
        )
    else:
        log.info("memory as planned: %s in use, %s free", _size(used), _size(free))


def out_of_memory(memory: DeviceMemory, before: int, pool: int) -> DoesNotFit:
    """Make the error for a device that refused an allocation while the pool and graphs were
    made."""
    left = max(1, (before * 3 // 4) // 2**20)
    return DoesNotFit(
        f"the device ran out of memory while the KV pool ({_size(pool)}) and the step's graphs "
        f"were made; {_size(before)} were free before and {_size(memory.free())} are now; what "
        f"would help: --kv-memory {left}MiB, --kv-dtype fp8, or smaller --step-tokens or "
        "--max-sequences",
        param="kv_memory",
    )


def _size(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if abs(value) >= 2**30 else f"{value / 2**20:.0f} MiB"
