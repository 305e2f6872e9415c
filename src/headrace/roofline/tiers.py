"""Savings of more room for KV, from a recorded trace of prefixes.

Under least-recently-used eviction a block is found if and only if it is among the last C different
requested blocks: its stack distance (Mattson and others, 1970). One pass over the trace gives the
distance of each block, and with that the hits of every size at once. A prefix is found as far as
all its blocks are. A block therefore counts at the largest distance of those before it and its own.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import InvalidRequest

MOST_LINES = 2_000_000
NEVER = 2**62
"""Distance of a block that was not asked for before."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as the context cache recorded them."""

    block_tokens: int
    block_bytes: int
    prefill_seconds: float
    """Seconds of computing one prompt token."""
    load_rate: float
    """Bytes a second of the tier below the pool."""
    seconds: float
    """From the first request to the last."""
    prefixes: list[list[str]]
    """Names of the blocks of each request."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Savings of a size of pool, with or without a tier below it, on the trace."""

    nbytes: int
    hits: float
    """Share of the tokens."""
    seconds: float
    """Saved computing time, less that of loading."""


def read_trace(file: Path) -> Trace:
    """Read a trace of `--context-cache-trace`; raise `InvalidRequest` if it is not one."""
    try:
        with file.open() as lines:
            head, *requests = _parsed(lines, file)
        times = [float(one["t"]) for one in requests]
        prefixes = [[str(key) for key in one["keys"]] for one in requests]
        return Trace(
            int(head["block_tokens"]),
            int(head["block_bytes"]),
            float(head["prefill_seconds"]),
            float(head["load_rate"]),
            max(times, default=0.0) - min(times, default=0.0),
            prefixes,
        )
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as wrong:
        raise InvalidRequest(f"{file} is no trace of prefixes: {wrong!r}", param="tiers") from None


def _parsed(lines: Iterable[str], file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines):
        if number > MOST_LINES:
            raise InvalidRequest(f"{file} has more than {MOST_LINES} lines", param="tiers")
        yield json.loads(line)


def distances(prefixes: list[list[str]]) -> list[int]:
    """Return the blocks that a cache must hold to find each block of each request, in order."""
    accesses = sum(map(len, prefixes))
    counts = [0] * (accesses + 1)  # A Fenwick tree over the places of latest accesses.

    def add(place: int, amount: int) -> None:
        while place <= accesses:
            counts[place] += amount
            place += place & -place

    def upto(place: int) -> int:
        total = 0
        while place:
            total += counts[place]
            place -= place & -place
        return total

    found, latest, now = [], dict[str, int](), 0
    for keys in prefixes:
        deepest = 0
        before = now  # Blocks of the request itself evict nothing of it.
        for key in keys:
            last = latest.get(key)
            if last is None:
                deepest = NEVER
            else:
                deepest = max(deepest, upto(before) - upto(min(last, before) - 1))
            found.append(deepest)
        for key in reversed(keys):  # The last block of a prefix is evicted first.
            now += 1
            if key in latest:
                add(latest[key], -1)
            latest[key] = now
            add(now, 1)
    return found


def savings(trace: Trace, pool: int, sizes: Iterable[int]) -> Iterator[tuple[Saving, Saving]]:
    """Yield for each size in bytes: (as RAM of the pool, as a tier below a pool of `pool`
    bytes)."""
    ordered = sorted(distances(trace.prefixes))
    computing = trace.block_tokens * trace.prefill_seconds
    loading = trace.block_bytes / trace.load_rate
    within = bisect_right(ordered, pool // trace.block_bytes)
    for size in sizes:
        at = bisect_right(ordered, size // trace.block_bytes)
        below = max(0, bisect_right(ordered, (pool + size) // trace.block_bytes) - within)
        blocks = max(1, len(ordered))
        tier = within * computing + below * max(0.0, computing - loading)
        yield (
            Saving(size, at / blocks, at * computing),
            Saving(size, (within + below) / blocks, tier),
        )
