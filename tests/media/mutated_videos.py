"""Decode many mutated videos, each in a confined child of its own, and count what came of them.

Run: `python tests/media/mutated_videos.py FILES SEED < whole files as JSON of base64`. As
`mutated_pictures` does it: the child is forked from a process that has imported the libraries.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
from collections import Counter

import numpy as np
from mutated_pictures import mutated

from headrace.base.filming import Sampling, filmed
from headrace.base.tiling import Fitting, written
from headrace.media import video_child
from headrace.media.decoder import obey
from headrace.media.formats import FFMPEG, HEAD, container
from headrace.media.videos import VIDEO_REFUSALS, sized

RULE, SAMPLING = Fitting(8, 3 * 64, 12 * 64), Sampling("even", 2.0, 4, 16, 2)
ORDER = {
    "rule": written(RULE),
    "sampling": list(SAMPLING),
    "pixels": 1 << 20,
    "side": 1 << 12,
    "frames": 1 << 10,
    "decoded": 1 << 24,
    "tile": 1 << 12,
    "resized": 1 << 16,
    "memory": 3 << 29,
    "processor_seconds": 20,
    "result": 3 << 16,
}


def outcome(data: bytes) -> str:
    """What the confined child makes of a file: "frames", a code of `VIDEO_REFUSALS`, or how it
    ended."""
    format = container(data[:HEAD])
    if format not in FFMPEG:
        return "format"
    source, said, into = (os.memfd_create(name) for name in ("source", "said", "into"))
    os.pwrite(source, data, 0)
    child = os.fork()
    if not child:
        os.dup2(source, 0)
        os.dup2(said, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            obey({**ORDER, "format": format, "into": into}, LIBRARIES, video_child.decode)
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
    if "total" in found:
        film = filmed(found["total"], found["rate"], SAMPLING)
        wide, high = sized(found["width"], found["height"], film, RULE).tile
        return "frames" if size >= 3 * wide * high * len(film.frames) else "too few frames"
    return str(found.get("refused", "silent"))


if __name__ == "__main__":
    files, draw = int(sys.argv[1]), np.random.default_rng(int(sys.argv[2]))
    wholes = [base64.b64decode(one) for one in json.load(sys.stdin)]
    LIBRARIES = video_child.imported("mp4")
    counts = Counter(outcome(mutated(wholes[at % len(wholes)], draw)) for at in range(files))
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    known = {"frames", *VIDEO_REFUSALS}
    open_files = len(os.listdir("/proc/self/fd"))
    print(json.dumps([counts, sorted(counts.keys() - known), memory, open_files]))
