"""The most likely tokens, without logits: the end of a greedy step."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import address, aligned
from . import records
from .emit import Emitted
from .panels import LOW_SHARE, OUTPUTS, PLANES
from .rank_records import HrAgree
from .records import KINDS, HrHead, HrLinear, HrPart, HrWorth


class HeadPart(NamedTuple):
    """A rank's part of a head."""

    rank: int
    first: int
    """The token of its first output."""
    found: npt.NDArray[np.int32]
    """[ranks, rows, 2]: HrBest of each, in memory of all."""
    exchange: Emitted


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
            *((None, 0) if share is None else (address(share.found[share.rank]), share.first)),
        )
        self._share = share
        self._op.keep = product, self._best, self._worth, self.bounds, self.lower, self.tokens

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
        codes = [records.BEST, records.PICK]
        made: list[Emitted] = [
            (code, self._op) for code in ([records.BOUND] if self.bounded else []) + codes
        ]
        if self._share is not None:
            found = self._share.found
            op = HrAgree(address(found), found.shape[1], address(self.tokens), len(found), 0)
            made += [self._share.exchange, (records.AGREE, op)]
        return made
