"""Weights on their way to a GPU: through two pinned buffers, one filled while the other is sent.

In a plain copy from a mapped file the driver copies page by page. Its one thread also waits for the
disk: 3 to 6 GB/s of a link's 50. Here several threads copy, which waits for the disk together, and
the device reads pinned memory by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from ..kernels.arrays import Array, tensor

ROOM = 64 * 2**20
"""Bytes of a buffer."""
THREADS = 8
LEAST = 2**20
"""Bytes of a copy that is worth a thread of its own."""


class Link(Protocol):
    """Copies to a device."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return host memory [nbytes] uint8 that the device can read by itself."""
        ...

    def empty_like(self, there: torch.Tensor) -> torch.Tensor:
        """Return memory of the device for a tensor of the host."""
        ...

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        """Begin to copy a buffer to the device; work launched later sees the copy. The returned
        function waits until the buffer may be written again."""
        ...


class CudaLink:
    def __init__(self, device: str) -> None:
        self._device = device

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty_like(self, there: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(there, device=self._device, memory_format=torch.contiguous_format)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        target.copy_(source, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record()
        return sent.synchronize


class Upload:
    """Copier of host arrays to one device; `close` waits for the last copies."""

    def __init__(self, link: Link, room: int = ROOM) -> None:
        self._link, self._room = link, room
        self._buffers: list[torch.Tensor] = []
        self._waits: list[Callable[[], object]] = []
        self._turn = 0
        self._threads = ThreadPoolExecutor(THREADS, "headrace-upload")

    def __call__(self, array: Array) -> torch.Tensor:
        """Return a contiguous copy on the device."""
        there = tensor(array)
        made = self._link.empty_like(there)
        if not there.numel():
            return made
        source = there.contiguous().view(-1).view(torch.uint8).numpy()
        target = made.view(-1).view(torch.uint8)
        for first in range(0, len(source), self._room):
            part = source[first : first + self._room]
            turn = self._turn = 1 - self._turn
            if not self._buffers:
                self._buffers = [self._link.buffer(self._room) for _ in range(2)]
                self._waits = [lambda: None] * 2
            self._waits[turn]()
            buffer = self._buffers[turn][: len(part)]
            self._fill(buffer.numpy(), part)
            self._waits[turn] = self._link.send(target[first : first + len(part)], buffer)
        return made

    def _fill(self, buffer: Array, part: Array) -> None:
        step = max(LEAST, -(-len(part) // THREADS))
        places = [slice(first, first + step) for first in range(0, len(part), step)]
        # numpy lets other threads run while it copies.
        list(self._threads.map(lambda place: np.copyto(buffer[place], part[place]), places))

    def close(self) -> None:
        for wait in self._waits:
            wait()
        self._buffers.clear()
        self._threads.shutdown()
