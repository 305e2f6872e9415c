"""Small arrays from the host to the device and back, without making the host wait.

A plain `.to(device)` waits for everything launched before it: the host could never prepare a step
while the device computes another. Copies go through pinned memory instead, which torch keeps until
the device has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..kernels.arrays import Array

if TYPE_CHECKING:
    import torch


def to_device(values: npt.NDArray[Any], device: torch.device | str) -> torch.Tensor:
    """Return an array as a tensor on the device; on the CPU it may share the array's memory."""
    import torch  # Local, as everywhere here: a worker of arrays of the host does without.

    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if str(device) == "cpu":
        return tensor
    if not len(tensor):
        return torch.empty_like(tensor, device=device)  # There is nothing to pin.
    return tensor.pin_memory().to(device, non_blocking=True)


_ALIGNED = 16
"""Alignment in bytes that kernels may assume of an array's address."""


def all_to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy several arrays at once: a launch each would cost the device more than their bytes."""
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    import torch

    starts, total = places(arrays)
    pinned = torch.empty(total, dtype=torch.uint8, pin_memory=True)
    fill(pinned, arrays, starts)
    return views(pinned.to(device, non_blocking=True), arrays, starts)


def places(arrays: Sequence[npt.NDArray[Any]]) -> tuple[list[int], int]:
    """Return the offset of each array in one buffer, and the buffer's length, in bytes."""
    starts, at = [], 0
    for array in arrays:
        starts.append(at)
        at += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return starts, max(at, _ALIGNED)


def fill(buffer: torch.Tensor, arrays: Sequence[npt.NDArray[Any]], starts: Sequence[int]) -> None:
    """Write the arrays into a uint8 buffer of the host."""
    memory = buffer.numpy()
    for array, start in zip(arrays, starts, strict=True):
        memory[start : start + array.nbytes].view(array.dtype)[:] = array


def views(
    buffer: torch.Tensor, arrays: Sequence[npt.NDArray[Any]], starts: Sequence[int]
) -> list[torch.Tensor]:
    """Return the arrays as views of a uint8 buffer of any device."""
    import torch

    found = []
    for array, start in zip(arrays, starts, strict=True):
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        found.append(buffer[start : start + array.nbytes].view(dtype))
    return found


def to_host(vector: Array) -> Callable[[], list[Any]]:
    """Begin to copy a vector to the host; the returned function waits for the copy and returns its
    values."""
    if isinstance(vector, np.ndarray) or vector.device.type == "cpu":
        values: list[Any] = vector.tolist()
        return lambda: values
    import torch

    tensor: torch.Tensor = vector
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> list[Any]:
        arrived.synchronize()
        values: list[Any] = pinned.tolist()
        return values

    return wait


class Stopwatch:
    """Timer of steps on a GPU, and of the idle time between two of them."""

    def __init__(self) -> None:
        self._previous: torch.cuda.Event | None = None

    def start(self) -> Callable[[], Callable[[], tuple[float, float]]]:
        """Start timing; call at a step's first launch.

        Call the result at the step's last launch, and that call's result after the step is done. It
        returns (seconds of the step, seconds that the device waited before it).
        """
        before, begin = self._previous, _event()

        def stop() -> Callable[[], tuple[float, float]]:
            end = self._previous = _event()

            def read() -> tuple[float, float]:
                end.synchronize()
                gap = 0.0 if before is None else before.elapsed_time(begin) / 1e3
                return begin.elapsed_time(end) / 1e3, gap

            return read

        return stop


def _event() -> torch.cuda.Event:
    import torch

    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
