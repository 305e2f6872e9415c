"""Decode many mutated pictures, each in a confined child of its own, and count what came of them.

Run: `python tests/media/mutated_pictures.py FILES SEED < whole files as JSON of base64`. The child
is forked from a process that has imported Pillow, so that a file takes milliseconds; apart from
that it is the child of a server. Prints the outcomes with their counts, and the largest memory.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
from collections import Counter

import numpy as np

from headrace.media import picture_child
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
            picture_child.obey({**ORDER, "format": format, "into": into}, PILLOW[format])
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


if __name__ == "__main__":
    files, draw = int(sys.argv[1]), np.random.default_rng(int(sys.argv[2]))
    wholes = [base64.b64decode(one) for one in json.load(sys.stdin)]
    PILLOW = {name: picture_child.imported(name) for name in picture_child.PLUGINS}
    counts = Counter(outcome(mutated(wholes[at % len(wholes)], draw)) for at in range(files))
    known = {"tiles", *PICTURE_REFUSALS}
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    open_files = len(os.listdir("/proc/self/fd"))
    print(json.dumps([counts, sorted(counts.keys() - known), memory, open_files]))
