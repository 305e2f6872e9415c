"""Owns: blocks, free lists, prefix index, eviction, layer groups.
Takes → gives: a pool shape → block tables, prefix hits, block deltas.
Does not know: tensors, the scheduler, requests beyond their token ids.
Invariant: free + cached + owned == total, in every group, whenever idle.
Where does my change go: the owners of a block and how long it lives.
"""

from __future__ import annotations

from .manager import KvManager, lent_of
from .pool import BlockPool
from .prefix import PrefixChain, root_of, tenant_of
from .table import BlockTable
from .tiers import Tiers

__all__ = [
    "BlockPool", "BlockTable", "KvManager", "PrefixChain", "Tiers", "lent_of", "root_of",
    "tenant_of",
]  # fmt: skip
