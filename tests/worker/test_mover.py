"""Threads that move blocks: what their orders say of the time that they took."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.base.tiers import KeyedBlock, OrderEnd
from headrace.kernels.operators import KvLayer
from headrace.worker import mover
from headrace.worker.gaps import Gaps
from headrace.worker.mover import Mover
from headrace.worker.stack import Stack

NBYTES = 2 * 64


class SlowTier:
    """Its first reads, one for each reader, wait until they are let go."""

    rank, nbytes = 0, 0

    def __init__(self) -> None:
        self.first = threading.Semaphore(mover.READERS)
        self.held = threading.Semaphore(0)
        self.free = threading.Event()

    def exists(self, group: int) -> set[bytes]:
        return {b"one", b"two"}

    def read(self, *asked: Any) -> memoryview:
        if self.first.acquire(blocking=False):
            self.held.release()
            assert self.free.wait(60)
        return memoryview(bytes(NBYTES))

    def expect(self, *asked: Any) -> None: ...
    def look(self, *, again: bool = False) -> None: ...


def test_the_time_of_an_order_has_no_waiting_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(
        mover, "time", SimpleNamespace(**vars(time) | {"perf_counter": lambda: now})
    )
    tier, ended = SlowTier(), dict[int, OrderEnd]()
    layer = KvLayer(np.zeros((9, 64), np.uint8), np.zeros((9, 64), np.uint8))
    cache: Any = SimpleNamespace(groups=[0], kept=lambda: [(layer, 0)])
    stack: Any = Stack([tier])  # type: ignore[list-item]
    moves = Mover(stack, lambda: cache, lambda: None, Gaps())
    blocks = [KeyedBlock(0, 1 + at, b"one", at, "") for at in range(mover.READERS * mover.CHUNK)]
    moves.read(1, blocks[:8] * 2)
    moves.read(2, blocks[:1])
    for _ in range(mover.READERS):
        assert tier.held.acquire(timeout=60)
    now = 105.0
    tier.free.set()
    moves.settle()
    ended = {end.ticket: end for end in moves.ended()}
    moves.close()
    assert ended[1].good == (True,) * 16
    assert ended[1].seconds == 100
    assert ended[2].seconds == 0
