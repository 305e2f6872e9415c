"""The fault table: a real server is killed, stopped, filled, flooded and lied to; what came back?

    python benchmarks/faults.py [--rows PATTERN] [--fuzz N] [--json FILE] [--table FILE]

Rows and mutations are those of tests/faults, of which CI tries the quick ones. `--fuzz` mutations
of each kind of input are tried beside (0: none). `--table` writes the result between the marks of a
page. Exit 1 where a row breaks what the documentation promises, or a mutation ends untyped.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "faults"))

import fault_rows
import fault_servers
import mutations
from fault_client import Row

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
HEADINGS = ("fault", "sent", "answered", "refused", "hung", "lost", "measured")
NAMES = {
    "unready_after_seconds": "not ready after {} s",
    "port_answers_seconds": "the port answers after {} s",
    "small_seconds": "the small one after {} s",
    "ready_again_seconds": "ready after {} s",
    "p99_ratio": "99th percentile of others × {}",
    "bodies_of_memory": "memory of {} bodies",
    "hold_seconds": "the event loop held for {} s",
}


def part(job: tuple[str, int, int]) -> tuple[str, Counter[str], list[tuple[int, str]]]:
    kind, count, seed = job
    return kind, *mutations.mutate(kind, count, seed)


def fuzz(count: int, processes: int) -> list[dict[str, Any]]:
    """`count` mutations of every kind, in slices that end with their process."""
    slice_ = 5000
    jobs = [
        (kind, min(slice_, count - first), first)
        for kind in mutations.examples()
        for first in range(0, count, slice_)
    ]
    ends: dict[str, Counter[str]] = {kind: Counter() for kind, _, _ in jobs}
    found: dict[str, list[tuple[int, str]]] = {kind: [] for kind in ends}
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=1) as pool:
        for kind, counted, findings in pool.imap_unordered(part, jobs):
            ends[kind] += counted
            found[kind] += findings
            print(kind, dict(ends[kind]), flush=True)
    return [
        {"kind": kind, "sent": ends[kind].total(), **ends[kind], "findings": found[kind][:20]}
        for kind in ends
    ]


async def rows(pattern: str, folder: Path) -> list[Row]:
    done: list[Row] = []

    def note(name: str, row: Row | None) -> None:
        if row is None:
            print(name, "is not to be had here", flush=True)
            return
        done.append(row)
        print(name, row.broken() or "as promised", row.facts, flush=True)

    table = {**fault_rows.QUICK, **fault_rows.SLOW}
    names = [name for name in table if fnmatch.fnmatch(name, pattern)]
    if names:
        with fault_rows.place(folder) as place:
            for name in names:
                note(name, await table[name](place))
    for name, fault in {**fault_servers.QUICK, **fault_servers.SLOW}.items():
        if fnmatch.fnmatch(name, pattern):
            note(name, await fault(folder))
    return done


def as_table(done: list[Row], fuzzed: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|--:|--:|--:|--:|--:|---|"]
    for row in done:
        facts = [text.format(row.facts[name]) for name, text in NAMES.items() if name in row.facts]
        counts = (row.sent, row.answered, row.refused, row.hung, row.lost)
        cells = (f"{row.kind}: {row.fault}", *(f"{count:,}" for count in counts), "; ".join(facts))
        lines.append(f"| {' | '.join(cells)} |")
    for one in fuzzed:
        counts = (one["sent"], one.get("read", 0), one.get("refused", 0), 0, one.get("untyped", 0))
        cells = (f"mutate: {one['kind']}", *(f"{count:,}" for count in counts), "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="*", help="names of rows to try, as a shell pattern")
    parser.add_argument("--fuzz", type=int, default=0, help="mutations of each kind")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = asyncio.run(rows(given.rows, Path(folder)))
    fuzzed = fuzz(given.fuzz, given.processes) if given.fuzz else []
    record = {
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "load": [round(load, 1) for load in os.getloadavg()],
        },
        "seconds": round(time.monotonic() - begin),
        "rows": [{**asdict(row), "broken": row.broken()} for row in done],
        "mutations": fuzzed,
    }
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    if given.table is not None:
        page = given.table.read_text()
        head, rest = page.split(BEGIN)
        _, tail = rest.split(END)
        given.table.write_text(f"{head}{BEGIN}\n\n{as_table(done, fuzzed)}\n\n{END}{tail}")
    broken = [f"{row.fault}: {wrong}" for row in done for wrong in row.broken()]
    broken += [f"{one['kind']}: {one['findings']}" for one in fuzzed if one["findings"]]
    for line in broken:
        print("BROKEN", line)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
