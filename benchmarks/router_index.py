"""What an index of all that a fleet's caches hold costs a router.

    python benchmarks/router_index.py [--replicas 1000] [--prefixes 2300000] [--json FILE]

Replicas tell as they do over a connection, 4,096 keys an event; a tenth of the prefixes is held by
ten replicas, the others by one. *Filled* is the time to read and take all events, as after a
restart; a look-up is one of a prompt with 64 beginnings (about 8,000 tokens), of which the first
half is held somewhere or none.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.engine.routing import LeastLoaded, PrefixAffinity

EVENT = 4096


@dataclass
class Place:
    number: int
    load: int = 0


@dataclass
class Asked:
    prefixes: list[int]


def events(replicas: int, prefixes: int, chances: random.Random) -> list[tuple[int, bytes]]:
    """(replica, its event as JSON)."""
    keys = [chances.getrandbits(64) for _ in range(prefixes)]
    held: list[list[int]] = [[] for _ in range(replicas)]
    for place, key in enumerate(keys):
        for _ in range(10 if place % 10 == 0 else 1):
            held[chances.randrange(replicas)].append(key)
    return [
        (n, msgspec.json.encode({"held": mine[at : at + EVENT], "gone": [], "in_work": 0}))
        for n, mine in enumerate(held)
        for at in range(0, len(mine), EVENT)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--prefixes", type=int, default=2_300_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chances = random.Random(1)
    told = events(args.replicas, args.prefixes, chances)
    policy = PrefixAffinity()
    begin = time.perf_counter()
    for replica, event in told:
        found = msgspec.json.decode(event)
        policy.told(replica, found["held"], found["gone"])
    filled = time.perf_counter() - begin
    known = list(policy._held)
    places = [Place(n, chances.randrange(4)) for n in range(args.replicas)]
    spent: dict[str, list[float]] = {"found": [], "not found": [], "least-loaded": []}
    other = LeastLoaded()
    for _ in range(2000):
        fresh = [chances.getrandbits(64) for _ in range(64)]
        for name, asked, by in (
            ("found", Asked(chances.sample(known, 32) + fresh[:32]), policy),
            ("not found", Asked(fresh), policy),
            ("least-loaded", Asked(fresh), other),
        ):
            begin = time.perf_counter()
            by.choose(asked, places)
            spent[name].append(time.perf_counter() - begin)
    del policy
    tracemalloc.start()
    policy = PrefixAffinity()
    before, _ = tracemalloc.get_traced_memory()
    for replica, event in told:
        found = msgspec.json.decode(event)
        policy.told(replica, found["held"], found["gone"])
    del found
    bytes_each = (tracemalloc.get_traced_memory()[0] - before) / args.prefixes
    record = {
        "replicas": args.replicas,
        "prefixes": args.prefixes,
        "filled_seconds": filled,
        "bytes_per_prefix": bytes_each,
        "choice_microseconds": {
            name: {
                "median": 1e6 * statistics.median(times),
                "p99": 1e6 * statistics.quantiles(times, n=100)[98],
            }
            for name, times in spent.items()
        },
    }
    print(json.dumps(record, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
