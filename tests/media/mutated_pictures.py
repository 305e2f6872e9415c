"""Decode many mutated pictures, each in a confined child of its own, and count what came of them.

Run: `python tests/media/mutated_pictures.py FILES SEED [JSON]`. The child is forked from a process
that has imported Pillow, so that a file takes milliseconds; apart from that it is the child of a
server. Prints (and writes) the outcomes with their counts, what is not a known one, the memory of
the largest child, and what this process has grown by since its first thousand files.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from drawn_pictures import FORMATS, drawn, encoded

from headrace.media import picture_child
from headrace.media.decoder import obey
from headrace.media.pictures import PICTURE_REFUSALS, picture_format

ORDER = {
    "rule": ["tiling", 96, 32, True],
    "resized": 1 << 28,
    "pixels": 4_000_000,
    "side": 1 << 14,
    "tiles": 32,
    "memory": 3 << 29,
    "processor_seconds": 20,
    "result": 32 * 3 * 32**2,
}


def mutated(whole: bytes, draw: np.random.Generator) -> bytes:
    """Bytes changed, cut and doubled at random."""
    data = bytearray(whole)
    for at in draw.integers(0, len(data), draw.integers(1, 20)):
        data[at] = draw.integers(0, 256)
    at = int(draw.integers(0, len(data) + 1))
    return bytes(data[:at] if draw.random() < 0.3 else data + data[at:])


def outcome(data: bytes) -> str:
    """What the confined child makes of a file: "tiles", a code of `PICTURE_REFUSALS`, or how it
    ended."""
    format = picture_format(data[:12])
    if format is None:
        return "format"
    source, said, into = (os.memfd_create(name) for name in ("source", "said", "into"))
    os.pwrite(source, data, 0)
    child = os.fork()
    if not child:
        os.dup2(source, 0)
        os.dup2(said, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            order = {**ORDER, "format": format, "into": into}
            obey(order, PILLOW[format], picture_child.decode)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    answer = os.pread(said, 1024, 0)
    size = os.fstat(into).st_size
    for each in (source, said, into):
        os.close(each)
    if status:
        return f"ended with {status}"
    found = json.loads(answer or "{}")
    if "rows" in found:
        whole = (found["rows"] * found["columns"] + 1) * 3 * 32**2
        return "tiles" if size == whole else "too few tiles"
    return str(found.get("refused", "silent"))


def resident() -> int:
    """Memory of this process, in KiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


if __name__ == "__main__":
    files, seed = int(sys.argv[1]), int(sys.argv[2])
    draw, begin = np.random.default_rng(seed), time.monotonic()
    wholes = [encoded(drawn(draw, 40, 30, mode), format, **more) for format, mode, more in FORMATS]
    PILLOW = {name: picture_child.imported(name) for name in picture_child.PLUGINS}
    counts: Counter[str] = Counter()
    first = open_first = 0
    for at in range(files):
        counts[outcome(mutated(wholes[at % len(wholes)], draw))] += 1
        if at == 999:
            first, open_first = resident(), len(os.listdir("/proc/self/fd"))
    told = {
        "count": files,
        "seed": seed,
        "seconds": round(time.monotonic() - begin, 1),
        "outcomes": dict(counts.most_common()),
        "unknown": sorted(counts.keys() - {"tiles", *PICTURE_REFUSALS}),
        "peak_kib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        "grown_kib": resident() - first,
        "descriptors_more": len(os.listdir("/proc/self/fd")) - open_first,
    }
    print(json.dumps(told))
    if len(sys.argv) > 3:
        Path(sys.argv[3]).write_text(json.dumps(told, indent=1) + "\n")
