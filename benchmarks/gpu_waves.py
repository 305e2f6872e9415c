"""Attention's programs over the multiprocessors, counted: what their order and number cost.

    python benchmarks/gpu_waves.py

A causal tile's work is the tiles of KV up to its own place. Programs are handed out in the order of
their numbers, each to the first place that is free, as the hardware does; the time until the last
has ended, over the work divided by the places, is what the order costs. Work is counted in tiles of
KV and two more for a program's start and end. Counted, not measured: that a program's time is its
work is assumed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np

from headrace.kernels.attention_plan import Planner

UNITS = 132
"""Multiprocessors of an H100 and an H200."""
ROWS, TILE, FIXED = 128, 64, 2
"""The table's configuration: query rows and tokens of KV of a tile; and start and end."""
HEADS, KV_HEADS = 32, 8
STEPS: dict[str, list[tuple[int, int]]] = {
    "8,192": [(0, 8192)],
    "2,048": [(0, 2048)],
    "512": [(0, 512)],
    "2,048 behind 2,048": [(2048, 2048)],
    "512 behind 7,680": [(7680, 512)],
    "32,768": [(0, 32768)],
    "2,048 behind 30,720": [(30720, 2048)],
    "8 of 1,000": [(0, 1000)] * 8,
    "1,000 and 872 decodes": [(1500, 1)] * 872 + [(0, 1000)],
    "3,000, 1,000 and 200 decodes": [(1500, 1)] * 200 + [(0, 3000), (0, 1000)],
}
"""(tokens before, tokens of the step) of each entry."""


def tiles_of(step: list[tuple[int, int]]) -> list[float]:
    """Work of the programs of one KV head, by number; 0 where one leaves at once. Entries of one
    token are not in the list of chunks."""
    tokens = ROWS // (HEADS // KV_HEADS)
    chunks = [(start, count) for start, count in step if count > 1]
    work = [0.0] * (sum(count for _, count in chunks) // tokens + len(chunks))
    at = 0
    for number, (start, count) in enumerate(chunks):
        for tile in range(-(-count // tokens)):
            last = start + min((tile + 1) * tokens, count)
            work[at // tokens + number + tile] = FIXED + -(-last // TILE)
        at += count
    return work


MIXES = {
    "256 x 1,000": [1000] * 256,
    "255 x 1,000, one of 10,000": [*[1000] * 255, 10_000],
    "255 x 1,000, one of 70,000": [*[1000] * 255, 70_000],
    "864 x 1,500": [1500] * 864,
    "32 x 4,096": [4096] * 32,
    "1 x 1,024": [1024],
    "1 x 100,000": [100_000],
}
"""Lengths of decoding sequences."""
BUCKETS = (1024, 4096, 16_384, 65_536, 131_072)


def programs_before(lengths: list[int]) -> tuple[int, int]:
    """→ (programs of decode attention a layer that work, and that leave at once), in splits of 512
    tokens, down to 128 in small steps, of a grid as long as the bucket of the longest sequence."""
    bucket, pairs, split = (
        min(b for b in BUCKETS if b >= max(lengths)),
        len(lengths) * KV_HEADS,
        512,
    )
    while split > 128 and pairs * -(-bucket // split) < 2 * UNITS:
        split //= 2
    work = KV_HEADS * sum(-(-length // split) for length in lengths)
    return work, pairs * -(-bucket // split) - work


def programs_now(lengths: list[int]) -> tuple[int, int]:
    """The same of the pieces that the host lists, in the graph of the same number of entries."""
    planner = Planner(KV_HEADS, [None])
    pieces, _ = planner.lists(np.ones(len(lengths), np.int64), np.array(lengths))
    return KV_HEADS * len(pieces), KV_HEADS * (planner.most_pieces(len(lengths)) - len(pieces))


def ordered(tiles: list[float], section: int, *, last_first: bool) -> Iterator[float]:
    """`section` heads beside each other, tile by tile; then the next ones."""
    for _ in range(KV_HEADS // section):
        for work in reversed(tiles) if last_first else tiles:
            yield from [work] * section


ORDERS: dict[str, Callable[[list[float]], Iterator[float]]] = {
    "as before: one head after another": lambda tiles: ordered(tiles, 1, last_first=False),
    "last tiles first": lambda tiles: ordered(tiles, 1, last_first=True),
    "2 heads beside": lambda tiles: ordered(tiles, 2, last_first=True),
    "4 heads": lambda tiles: ordered(tiles, 4, last_first=True),
    "all 8": lambda tiles: ordered(tiles, 8, last_first=True),
    "all 8, sorted by work": lambda tiles: ordered(sorted(tiles), 8, last_first=True),
}


def over_ideal(order: Iterator[float], places: int) -> float:
    """Time of the order, over its work divided by the places."""
    free = [0.0] * places
    total = 0.0
    for work in order:
        total += work
        heapq.heapreplace(free, free[0] + work)
    return max(free) / (total / places)


def main() -> None:
    print(f"| step | programs a multiprocessor | {' | '.join(ORDERS)} |")
    print("|---|---:|" + "---:|" * len(ORDERS))
    for name, step in STEPS.items():
        for resident in (1, 2):
            tiles = tiles_of(step)
            cells = [
                f"{over_ideal(order(tiles), UNITS * resident):.2f}" for order in ORDERS.values()
            ]
            print(f"| {name} | {resident} | {' | '.join(cells)} |")
    print("\n| decode attention a layer | splits: work / leave at once | pieces: the same |")
    print("|---|---:|---:|")
    for name, lengths in MIXES.items():
        before, now = programs_before(lengths), programs_now(lengths)
        print(f"| {name} | {before[0]:,} / {before[1]:,} | {now[0]:,} / {now[1]:,} |")


if __name__ == "__main__":
    main()
