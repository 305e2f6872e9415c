"""The fault table: a real server is killed, stopped, filled, flooded and lied to; what came back?

    python tests/faults/table.py [--rows PATTERN] [--fuzz N [--mutations FILE]] [--json FILE]
        [--keep] [--table FILE]

Rows and mutations are those of tests/faults, of which CI tries the quick ones. `--fuzz` mutations
of each kind of input are tried beside (0: none; mutate.py); where FILE has the results
of some, it goes on from them. Of others' times beside an attack the median of three runs is told;
the attack's sender is a process of its own. `--table` writes the result between the marks of a
page. Exit 1 where a row breaks what the documentation promises, or a mutation ends untyped.
"""

from __future__ import annotations

import argparse
import asyncio
import fnmatch
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fault_gateway
import fault_programs
import fault_rows
import fault_servers
import mutate
from fault_client import Row

RUNS = 3
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
HEADINGS = ("fault", "sent", "answered", "refused", "hung", "lost", "measured")
NAMES = {
    "unready_after_seconds": "not ready after {} s",
    "port_answers_seconds": "the port answers after {} s",
    "small_seconds": "the small one after {} s",
    "ready_again_seconds": "ready after {} s",
    "p99_ratio": "99th percentile of others × {}",
    "memory_beside_mib": "{} MiB beside",
    "memory_mib": "{} MiB",
    "hold_seconds": "the event loop held for {} s",
    "wrong_after_the_test": "{} wrong answers after the test",
    "seen_seconds": "lost after {} s",
    "jumps_unseen": "{} jumps and losses untold",
    "age_seconds": "age at most {} s",
    "unseen": "{} bits turned unseen",
    "unnamed": "{} misses without their cause",
}


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
        with fault_rows.place(folder, runs=RUNS) as place:
            for name in names:
                note(name, await table[name](place))
    own = fault_servers.QUICK | fault_servers.SLOW | fault_gateway.QUICK | fault_programs.QUICK
    for name, fault in own.items():
        if fnmatch.fnmatch(name, pattern):
            note(name, await fault(folder))
    return done


def kept(before: list[dict[str, Any]], done: list[Row]) -> list[Row]:
    """Rows of a record, each as it was tried now, or as it was; then those that are new."""
    new = {(row.kind, row.fault): row for row in done}
    old = [Row(**{name: one[name] for name in one if name != "broken"}) for one in before]
    return [new.pop((row.kind, row.fault), row) for row in old] + list(new.values())


def as_table(done: list[Row], fuzzed: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---|--:|--:|--:|--:|--:|---|"]
    for row in done:
        facts = [text.format(row.facts[name]) for name, text in NAMES.items() if name in row.facts]
        counts = (row.sent, row.answered, row.refused, row.hung, row.lost)
        cells = (f"{row.kind}: {row.fault}", *(f"{count:,}" for count in counts), "; ".join(facts))
        lines.append(f"| {' | '.join(cells)} |")
    if fuzzed:
        ends = Counter[str]()
        for one in fuzzed:
            ends.update({"sent": one["sent"], **one["ends"]})
        ends["lost"] += ends["untyped"]
        counts = (ends[name] for name in ("sent", "read", "refused", "hung", "lost"))
        kinds = ", ".join(one["kind"] for one in fuzzed)
        cells = (f"mutate: {kinds}", *(f"{count:,}" for count in counts), "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="*", help="names of rows to try, as a shell pattern")
    parser.add_argument("--fuzz", type=int, default=0, help="mutations of each kind")
    parser.add_argument("--mutations", type=Path, help="their results, from which it goes on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--keep", action="store_true", help="what the JSON has of other rows stays")
    given = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = asyncio.run(rows(given.rows, Path(folder)))
        file = given.mutations or Path(folder) / "mutations.json"
        fuzzed = mutate.run(given.fuzz, file) if given.fuzz else []
    if given.keep:
        before = json.loads(given.json.read_text())
        done = kept(before["rows"], done)
        fuzzed = fuzzed or before["mutations"]
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
