"""Which rank has which expert of each mixture, and what they have cost."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

STEPS = 128
"""Steps after which experts are dealt out anew, where some ranks' had more to do."""
GAIN = 0.95
"""A new deal must leave no more of the busiest ranks' work."""


class Dealing:
    """A placement map: whole experts dealt out to ranks, first in runs of as many."""

    def __init__(self, experts: Sequence[int], ranks: int, rank: int) -> None:
        """`experts`: how many each mixture has."""
        self.ranks, self.rank = ranks, rank
        self.owners = [np.arange(count, dtype=np.int32) * ranks // count for count in experts]
        """By mixture, the rank of each expert: what the steps read, changed in place."""
        self.went = [np.zeros(count, np.int64) for count in experts]
        """By mixture, what each expert cost: eight of each step that read its weights, and one of
        each row, since products of eight rows take two steps of one."""
        self.sign = 0
        """What ranks tell each other at the end of a step, so that none goes on with a map of its
        own: a multiple of four below 2 ** 31."""

    def begin(self, step: int) -> None:
        """Before step number `step`: deal out anew, where that evens out the work. Routing is every
        rank's, so that all have counted the same, and come untold to the same map."""
        owners = self.better() if step % STEPS == 0 else None
        if owners is not None:
            self.set(owners)

    def forget(self) -> None:
        """Behind a step that failed, in which ranks may have come to different places, and behind
        steps that were nobody's."""
        for went in self.went:
            went[:] = 0

    def set(self, owners: Sequence[Sequence[int]]) -> None:
        """Another map, between two steps."""
        for mine, new in zip(self.owners, owners, strict=True):
            mine[:] = new
        self.sign = zlib.crc32(b"".join(map(bytes, self.owners))) >> 3 << 2

    def better(self) -> list[list[int]] | None:
        """A map by which the busiest ranks would have had less work lately; None: there is none.

        The costliest expert goes to the rank that has least, and so on (Graham 1969).
        """
        dealt, before, after = [], 0, 0
        for went, owners in zip(self.went, self.owners, strict=True):
            sums, new = [0] * self.ranks, [0] * len(went)
            for expert in np.argsort(-went, kind="stable").tolist():
                new[expert] = sums.index(min(sums))
                # Of those that cost nothing each rank gets as many.
                sums[new[expert]] += max(1, int(went[expert]))
            dealt.append(new)
            before += int(np.bincount(owners, went, self.ranks).max())
            after += int(np.bincount(new, went, self.ranks).max())
            went //= 2
        return dealt if after < GAIN * before else None
