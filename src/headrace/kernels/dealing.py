"""Expert placement: the rank of each expert of each mixture, and the costs of the experts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

STEPS = 128
"""Steps between two possible changes of the placement."""
GAIN = 0.95
"""A new placement must reduce the busiest ranks' work to this share or less."""


class Dealing:
    """Placement map of whole experts to ranks, initially in runs of equal length."""

    def __init__(self, experts: Sequence[int], ranks: int, rank: int) -> None:
        """`experts`: number of experts of each mixture."""
        self.ranks, self.rank = ranks, rank
        self.owners = [np.arange(count, dtype=np.int32) * ranks // count for count in experts]
        """By mixture, the rank of each expert. Steps read it; it is changed in place."""
        self.went = [np.zeros(count, np.int64) for count in experts]
        """By mixture, the cost of each expert: eight for each step that reads its weights and one
        for each row: a product of eight rows takes as long as two of one."""
        self.sign = 0
        """Checksum of the map, a multiple of four below 2 ** 31. Ranks exchange it at the end of a
        step, so that none continues with a different map."""

    def begin(self, step: int) -> None:
        """Change the placement before step number `step` if that balances the work. Every rank sees
        all routing, so all compute the same map without a message."""
        owners = self.better() if step % STEPS == 0 else None
        if owners is not None:
            self.set(owners)

    def forget(self) -> None:
        """Reset the costs after a failed step, which ranks may have left at different points, and
        after warm-up steps."""
        for went in self.went:
            went[:] = 0

    def set(self, owners: Sequence[Sequence[int]]) -> None:
        """Set another map between two steps."""
        for mine, new in zip(self.owners, owners, strict=True):
            mine[:] = new
        self.sign = zlib.crc32(b"".join(map(bytes, self.owners))) >> 3 << 2

    def better(self) -> list[list[int]] | None:
        """Return a map with which the busiest ranks would have had less recent work, or None.

        The costliest expert goes to the least loaded rank, and so on (Graham 1969).
        """
        dealt, before, after = [], 0, 0
        for went, owners in zip(self.went, self.owners, strict=True):
            sums, new = [0] * self.ranks, [0] * len(went)
            for expert in np.argsort(-went, kind="stable").tolist():
                new[expert] = sums.index(min(sums))
                # Unused experts are spread evenly.
                sums[new[expert]] += max(1, int(went[expert]))
            dealt.append(new)
            before += int(np.bincount(owners, went, self.ranks).max())
            after += int(np.bincount(new, went, self.ranks).max())
            went //= 2
        return dealt if after < GAIN * before else None
