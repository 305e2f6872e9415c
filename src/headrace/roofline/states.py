"""How many blocks of states a pool has: see `kv.states`."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.groups import block_bytes, pool_bytes
from ..base.step import GroupShape, PoolShape

SHARE = 0.25
MOST = 4
"""Checkpoints take up to this share of the bytes of what is kept of tokens, and no more than so
many for each row; two are the least."""


def state_blocks(
    rows: int, block_size: int, paged: Sequence[GroupShape], states: GroupShape
) -> int:
    """Blocks of the group `states` beside the others: the null block, one of each row, and so many
    checkpoints as are worth their bytes."""
    share = int(SHARE * pool_bytes(PoolShape(block_size, tuple(paged))))
    checkpoints = share // block_bytes(states, block_size)
    return 1 + rows + max(2, min(checkpoints, MOST * rows))
