"""How many blocks of states a pool has: see `kv.states`."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.groups import block_bytes, pool_bytes
from ..base.step import GroupShape, PoolShape

SHARE = 0.25
MOST = 4
"""Checkpoints take up to this share of the bytes of what is kept of tokens, and no more than so
many for each row; two are the least."""


def with_states(rows: int, block_size: int, groups: Sequence[GroupShape]) -> tuple[GroupShape, ...]:
    """The `groups` of a pool, of which the last, where it is of states, gets its blocks: the null
    block, one of each row, and so many checkpoints as are worth their bytes."""
    if not groups or not groups[-1].state:
        return tuple(groups)
    *paged, states = groups
    share = int(SHARE * pool_bytes(PoolShape(block_size, tuple(paged))))
    checkpoints = max(2, min(share // block_bytes(states, block_size), MOST * rows))
    return (*paged, states._replace(blocks=1 + rows + checkpoints))
