"""Stack distances, and what they say of sizes."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest

from headrace.base.errors import InvalidRequest
from headrace.roofline.tiers import NEVER, distances, read_trace, savings


def hits_of(prefixes: list[list[str]], capacity: int) -> int:
    """A cache of that many blocks, played."""
    cache: OrderedDict[str, None] = OrderedDict()
    hits = 0
    for keys in prefixes:
        for key in keys:
            if key not in cache:
                break
            hits += 1
        for key in reversed(keys):
            cache.pop(key, None)
            cache[key] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def test_distances_are_what_a_cache_of_each_size_finds() -> None:
    rng = random.Random(1)
    prefixes = []
    for _ in range(200):
        document, length = rng.randrange(8), rng.randrange(1, 12)
        prefixes.append([f"{document}-{at}" for at in range(length)])
    found = distances(prefixes)
    for capacity in (1, 5, 10, 20, 40, 80, 1000):
        assert sum(one <= capacity for one in found) == hits_of(prefixes, capacity)


def test_a_trace_is_read_and_priced(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    head = {"block_tokens": 16, "block_bytes": 1 << 20, "prefill_seconds": 0.001, "load_rate": 1e9}
    asked = [
        {"t": at, "tenant": "a", "keys": [f"{at % 4}-{b}" for b in range(40)]} for at in range(8)
    ]
    file.write_text("\n".join(json.dumps(one) for one in (head, *asked)))
    trace = read_trace(file)
    assert trace.seconds == 7
    [(small, _), (large, below)] = savings(trace, 0, [64 << 20, 256 << 20])
    assert (small.hits, large.hits, below.hits) == (0.0, 0.5, 0.5)
    assert large.seconds == pytest.approx(160 * 16 * 0.001)
    assert below.seconds == pytest.approx(160 * (16 * 0.001 - (1 << 20) / 1e9))
    assert distances(trace.prefixes)[0] == NEVER
    file.write_text("{}\n")
    with pytest.raises(InvalidRequest, match="no trace"):
        read_trace(file)
