"""The most likely tokens, without logits: the end of a greedy step."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import address, aligned
from ..ranks import RankMemory
from ..weights import OUTPUTS, PLANES
from . import emit
from .emit import Emitted
from .panels import LOW_SHARE
from .records import BOUNDED, CODES, KINDS, HrLinear, HrPart, HrWorth


class HeadPart(NamedTuple):
    """A rank's part of a head."""

    commons: RankMemory
    first: int
    """Token of its first output."""
    place: int
    """Number of its first exchange; it has two."""

    def exchange(self, number: int, room: npt.NDArray[np.uint8]) -> Emitted:
        """Emit an exchange of the rows of `room` that the ranks have written."""
        ranks, size = room.shape
        bounds = [rank * size for rank in range(ranks + 1)]
        piece = emit.piece(room.reshape(1, -1), bounds, -1)
        return emit.exchange(self.commons, self.place + number, [piece])

    def room(self, stride: int) -> npt.NDArray[np.uint8]:
        """Take memory of all ranks, a row for each: eight bytes for each of `stride` rows."""
        size = self.commons.ranks, 8 * stride
        room: npt.NDArray[np.uint8] = self.commons.take(math.prod(size)).reshape(size)
        return room


class Head:
    """The most likely token of each of `rows` rows: see csrc/head.h, and csrc/bound.h for a head in
    planes. It replaces `product`, which has one part and no bias."""

    def __init__(
        self,
        product: HrLinear,
        threads: int,
        rows: int,
        bounded: int = BOUNDED,
        share: HeadPart | None = None,
    ) -> None:
        """`share`: this rank's part, if each rank has some of the tokens."""
        assert bounded <= BOUNDED
        part = HrPart.from_address(product.parts)
        # At least a cache line each: threads write next to each other.
        stride = -(-rows // 16) * 16
        self.tokens = np.zeros(rows, np.int64)
        self.bounded = min(rows, bounded) if part.kind == KINDS[PLANES] else 0
        """Most rows for which the candidate panels are found first."""
        self.bounds = np.zeros((self.bounded, -(-part.out // OUTPUTS)), np.float32)
        """Upper bounds of the logits of each such row and panel."""
        self.lower = aligned((threads, stride), np.float32)
        """Lower bounds of the highest logit, by thread."""
        self._best = aligned((threads, stride, 2), np.int32)
        self._worth = aligned((threads, ctypes.sizeof(HrWorth)), np.uint8)
        self._worth[:] = 0
        bounds = self.bounds if self.bounded else None
        given = product, self._best, stride, self.tokens, bounds, self.lower, self._worth
        _, self._op = emit.record("BEST", *given, self.bounded)
        self._share = share
        if share is not None:
            ranks, rank = share.commons.ranks, share.commons.rank
            self._found, self._lowest = share.room(stride), share.room(stride)
            self._op.found, self._op.first = address(self._found[rank]), share.first
            self._op.lowest, self._op.ranks, self._op.rank = address(self._lowest), ranks, rank
            self._agree = emit.record("AGREE", self._found, stride, self.tokens, ranks)

    @property
    def worth(self) -> HrWorth:
        """Return the first thread's account: whether bounds pay off, and the bytes saved."""
        return HrWorth.from_address(address(self._worth))

    def spared(self) -> float:
        """Return the average share of the head's bytes that a step of up to `bounded` rows did not
        read: the plane of low bits, minus the candidates, whose high bits are read twice."""
        worth = self.worth
        steps = worth.with_ + worth.without
        left = worth.left / max(self.bounds.shape[1], 1)
        return (worth.with_ * LOW_SHARE - left) / steps if steps else 0.0

    def records(self) -> list[Emitted]:
        bound = [(CODES["BOUND"], self._op)] if self.bounded else []
        best = [(CODES["BEST"], self._op), (CODES["PICK"], self._op)]
        share = self._share
        if share is None:
            return bound + best
        if bound:
            bound += [(CODES["LOWER"], self._op), share.exchange(0, self._lowest)]
        return [*bound, *best, share.exchange(1, self._found), self._agree]
