"""The most likely tokens, without logits: the end of a greedy step."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import address, aligned
from ..model import RankMemory
from . import emit, records
from .emit import Emitted
from .panels import LOW_SHARE, OUTPUTS, PLANES
from .rank_records import HrAgree
from .records import KINDS, HrHead, HrLinear, HrPart, HrWorth


class HeadPart(NamedTuple):
    """A rank's part of a head."""

    commons: RankMemory
    first: int
    """The token of its first output."""
    place: int
    """The number of its first exchange, of which there are two."""

    def exchange(self, number: int, room: npt.NDArray[np.uint8]) -> Emitted:
        """An exchange of what each rank has written in its row of `room`."""
        ranks, size = room.shape
        bounds = [rank * size for rank in range(ranks + 1)]
        piece = emit.piece(room.reshape(1, -1), bounds, -1)
        return emit.exchange(self.commons, self.place + number, [piece])

    def room(self, stride: int) -> npt.NDArray[np.uint8]:
        """Room in memory of all, by rank: for so many rows, eight bytes a row."""
        size = self.commons.ranks, 8 * stride
        room: npt.NDArray[np.uint8] = self.commons.take(math.prod(size)).reshape(size)
        return room


class Head:
    """The most likely token of each of `rows` rows: see csrc/head.h, and csrc/bound.h for a head in
    planes. `product`, of one part without a bias, is the one that it takes the place of."""

    def __init__(
        self,
        product: HrLinear,
        threads: int,
        rows: int,
        bounded: int = records.BOUNDED,
        share: HeadPart | None = None,
    ) -> None:
        """`share`: where ranks have some of the tokens each."""
        assert bounded <= records.BOUNDED
        part = HrPart.from_address(product.parts)
        # A cache line each at least: threads write side by side.
        stride = -(-rows // 16) * 16
        self.tokens = np.zeros(rows, np.int64)
        self.bounded = min(rows, bounded) if part.kind == KINDS[PLANES] else 0
        """Up to so many rows the panels that can hold the token are found first."""
        self.bounds = np.zeros((self.bounded, -(-part.out // OUTPUTS)), np.float32)
        """Where they are, for each row and panel the bound of its logits."""
        self.lower = aligned((threads, stride), np.float32)
        """Lower bounds of the highest logit, by thread."""
        self._best = aligned((threads, stride, 2), np.int32)
        self._worth = aligned((threads, ctypes.sizeof(HrWorth)), np.uint8)
        self._worth[:] = 0
        self._op = HrHead(
            product,
            address(self._best),
            stride,
            address(self.tokens),
            address(self.bounds) if self.bounded else None,
            address(self.lower),
            address(self._worth),
            self.bounded,
        )
        self._share = share
        self._op.keep = product, self._best, self._worth, self.bounds, self.lower, self.tokens
        if share is not None:
            ranks, rank = share.commons.ranks, share.commons.rank
            self._found, self._lowest = share.room(stride), share.room(stride)
            self._op.found, self._op.first = address(self._found[rank]), share.first
            self._op.lowest, self._op.ranks, self._op.rank = address(self._lowest), ranks, rank
            self._agree = HrAgree(address(self._found), stride, address(self.tokens), ranks, 0)

    @property
    def worth(self) -> HrWorth:
        """The first thread's record of whether bounds are worth it, and what they have spared."""
        return HrWorth.from_address(address(self._worth))

    def spared(self) -> float:
        """Share of the head's bytes that a step of up to `bounded` rows did not read, on average so
        far: the plane of low bits, but for candidates, whose high bits are read again."""
        worth = self.worth
        steps = worth.with_ + worth.without
        left = worth.left / max(self.bounds.shape[1], 1)
        return (worth.with_ * LOW_SHARE - left) / steps if steps else 0.0

    def records(self) -> list[Emitted]:
        bound: list[Emitted] = [(records.BOUND, self._op)] if self.bounded else []
        best: list[Emitted] = [(records.BEST, self._op), (records.PICK, self._op)]
        share = self._share
        if share is None:
            return bound + best
        if bound:
            bound += [(records.LOWER, self._op), share.exchange(0, self._lowest)]
        return [*bound, *best, share.exchange(1, self._found), (records.AGREE, self._agree)]
