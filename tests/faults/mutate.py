"""Mutation fuzz of every kind of input, in pieces: a file of results that grows, and goes on.

    python tests/faults/mutate.py --count N --json FILE [--kinds PATTERN]

Each kind is tried with the seeds from where FILE ends up to N, a slice at a time, every slice in a
process of its own. A mutation that raises what is not typed is a finding; so is one that needs more
than `SECONDS` of a processor or ends the process (it is skipped, and the slice goes on after it).
Exit 1 where there are findings.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import http_mutations
import mutations

SLICE = 4000
SECONDS = 20
"""Processor time for one mutation; a template has a hard limit of six."""
MEMORY = 8 * 2**30
"""Bytes of address space, of which importing takes a good part."""
HTTP = "http"


def kinds() -> list[str]:
    return [*mutations.examples(), HTTP]


def child(kind: str, count: int, seed: int, at: Path) -> None:
    """One slice; prints what came of it, and keeps in `at` which mutation it tries."""
    import resource

    if kind == HTTP:
        ends, findings = http_mutations.mutate(count, seed)
    else:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        with at.open("r+b", buffering=0) as file:

            def before(number: int) -> None:
                # The kernel ends what hangs, also in foreign code.
                used = resource.getrusage(resource.RUSAGE_SELF)
                soft = int(used.ru_utime + used.ru_stime) + SECONDS
                resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
                os.pwrite(file.fileno(), struct.pack("<q", number), 0)

            ends, findings = mutations.mutate(kind, count, seed, before)
    print(json.dumps({"ends": ends, "findings": findings}))


def slice_of(kind: str, count: int, seed: int) -> dict[str, Any]:
    """What came of the mutations from `seed` on: their number, ends and findings."""
    with tempfile.NamedTemporaryFile() as at:
        at.write(struct.pack("<q", seed))
        at.flush()
        command = [sys.executable, __file__, "--child", kind, str(count), str(seed), at.name]
        ran = subprocess.run(command, stdout=subprocess.PIPE, check=False)
        if ran.returncode == 0:
            return {"done": count, **json.loads(ran.stdout.splitlines()[-1])}
        if kind == HTTP or ran.returncode > 0:
            raise SystemExit(f"the slice of {kind} at {seed} failed: {ran.returncode}")
        (number,) = struct.unpack("<q", Path(at.name).read_bytes())
    how = "hung" if -ran.returncode == signal.SIGXCPU else "lost"
    # What was tried before it is tried again: its counts went with the process.
    before = slice_of(kind, number - seed, seed) if number > seed else {"ends": {}, "findings": []}
    ends = {**before["ends"], how: before["ends"].get(how, 0) + 1}
    finding = [number, f"{how}: ended by {signal.Signals(-ran.returncode).name}"]
    return {"done": number - seed + 1, "ends": ends, "findings": [*before["findings"], finding]}


def run(count: int, file: Path, pattern: str = "*") -> list[dict[str, Any]]:
    """All kinds up to `count` mutations each; returns what the file then has."""
    record = json.loads(file.read_text()) if file.exists() else {"seconds": 0.0, "kinds": {}}
    names = [kind for kind in kinds() if fnmatch.fnmatch(kind, pattern)]
    for kind in names:
        record["kinds"].setdefault(kind, {"sent": 0, "ends": {}, "findings": []})
    while True:
        # The kind that is least far, so that all grow together.
        kind = min(names, key=lambda kind: record["kinds"][kind]["sent"])
        one = record["kinds"][kind]
        if one["sent"] >= count:
            return [{"kind": kind, **record["kinds"][kind]} for kind in record["kinds"]]
        begin = time.monotonic()
        part = slice_of(kind, min(SLICE, count - one["sent"]), one["sent"])
        one["sent"] += part["done"]
        for how, number in part["ends"].items():
            one["ends"][how] = one["ends"].get(how, 0) + number
        one["findings"] += part["findings"]
        record["seconds"] = round(record["seconds"] + time.monotonic() - begin, 1)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(file)
        print(kind, one["sent"], one["ends"], part["findings"][:5], flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, count, seed, at = sys.argv[2:]
        child(kind, int(count), int(seed), Path(at))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="mutations of each kind")
    parser.add_argument("--json", type=Path, required=True, help="results; it goes on from them")
    parser.add_argument("--kinds", default="*", help="a shell pattern")
    given = parser.parse_args()
    sys.exit(any(one["findings"] for one in run(given.count, given.json, given.kinds)))


if __name__ == "__main__":
    main()
