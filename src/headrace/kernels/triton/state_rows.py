"""Entries of a step, as the kernels of states read them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_entry(query_starts, row, entries):
    """Return the entry that owns a token of the step; entries without tokens own none."""
    low = 0
    high = entries
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) <= row:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def read_entry(query_starts, lengths, table, entry, table_stride):
    """Return the entry's first token in the step, its tokens, its length after them, and its
    block."""
    first = tl.load(query_starts + entry)
    count = tl.load(query_starts + entry + 1) - first
    return first, count, tl.load(lengths + entry), tl.load(table + entry * table_stride)
