"""How even experts' ranks are with copies of the hottest experts, on the published skew.

`python benchmarks/roofline/spare_experts.py benchmarks/results/spare_experts.json` draws 32 steps
of the law of `roofline.routing`, places the experts by their counts, and reports mean / max load of
the ranks in 200 steps that were not seen: placed at random as they are, packed, packed with an
eighth more places for copies, whose tokens are dealt out evenly.
"""

from __future__ import annotations

import heapq
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.roofline.routing import DEEPSEEK_SKEW, OTHERS_SKEW, popularity

MODELS = {
    "deepseek-v3": (256, 8, DEEPSEEK_SKEW),
    "qwen3-235b-a22b": (128, 8, OTHERS_SKEW),
    "gpt-oss-120b": (128, 4, OTHERS_SKEW),
}
"""Model → (experts, active of them, exponent)."""
SPARE = 8
"""One spare place for so many experts: 12.5 %."""


def placed(loads: Sequence[float], ranks: int, spare: int) -> list[list[int]]:
    """The experts of each rank: `spare` times one more copy of the expert with the most load a
    copy, then the heaviest copy left to the rank with the least, as long as it has room."""
    hottest = [(-load, expert) for expert, load in enumerate(loads)]
    copies = [1] * len(loads)
    heapq.heapify(hottest)
    for _ in range(spare):
        expert = hottest[0][1]
        copies[expert] += 1
        heapq.heapreplace(hottest, (-loads[expert] / copies[expert], expert))
    room = -(-(len(loads) + spare) // ranks)
    lightest = [(0.0, rank) for rank in range(ranks)]
    places: list[list[int]] = [[] for _ in range(ranks)]
    parts = [
        (loads[one] / copies[one], one) for one in range(len(loads)) for _ in range(copies[one])
    ]
    for load, expert in sorted(parts, reverse=True):
        before, rank = heapq.heappop(lightest)
        places[rank].append(expert)
        if len(places[rank]) < room:
            heapq.heappush(lightest, (before + load, rank))
    return places


def evenness(loads: Sequence[float], places: Sequence[Sequence[int]]) -> float:
    """Mean / max of the ranks' loads, where each copy of an expert gets an equal part."""
    copies = np.bincount([one for place in places for one in place], minlength=len(loads))
    each = np.asarray(loads) / copies
    sums = [each[list(place)].sum() for place in places]
    return float(np.mean(sums) / max(sums))


def row(model: str, tokens: int, ranks: int) -> dict[str, Any]:
    """`tokens` a step, of all groups together."""
    experts, active, skew = MODELS[model]
    chances = np.random.default_rng(1)
    law = chances.permutation(popularity(experts, active, tokens, skew))
    seen = chances.binomial(tokens * 32, law)
    ways = {
        "as they are": np.arange(experts).reshape(ranks, -1).tolist(),
        "packed": placed(seen.tolist(), ranks, 0),
        "with copies": placed(seen.tolist(), ranks, experts // SPARE),
    }
    steps = [chances.binomial(tokens, law).tolist() for _ in range(200)]
    found = {way: float(np.mean([evenness(one, p) for one in steps])) for way, p in ways.items()}
    return {"model": model, "tokens": tokens, "ranks": ranks, **found}


def main() -> None:
    rows = [
        row(model, tokens, ranks)
        for model in MODELS
        for tokens in (1024, 16384)
        for ranks in (8, 16, 32)
    ]
    for one in rows:
        print(" | ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in one.values()))
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
