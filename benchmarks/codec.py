"""How fast SNAC's decoder makes sound on this CPU, and how much sound the first samples wait for.

Run: `python benchmarks/codec.py`. Weights are random, sizes those of SNAC at 24 kHz: the time does
not depend on what the numbers are. Pieces are as the server takes them (`speaking.PIECE`).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from headrace.engine.speaking import PIECE  # noqa: E402
from headrace.kernels.cpu.library import Team  # noqa: E402
from headrace.speech.codec import Codec  # noqa: E402
from headrace.speech.codec_files import open_codec  # noqa: E402
from tiny.snac import make_codec  # noqa: E402
from tiny.speaking import silent  # noqa: E402

SIZES = {"decoder_dim": 1024, "encoder_dim": 48, "codebook_size": 4096}
ROUNDS, SECONDS = 7, 8


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        make_codec(Path(folder), silent, **SIZES)
        for threads in (1, 2):
            codec = Codec(open_codec(Path(folder)), Team(threads))
            files = codec.files
            count = -(-SECONDS * files.rate // files.hop)
            frames = np.random.default_rng(0).integers(0, files.codes, (count, 7), np.int64)
            rates, first = [], 0
            for _ in range(ROUNDS):
                stream, made, begin = codec.stream(1), 0, time.perf_counter()
                for at in range(0, count, PIECE):
                    made += len(stream.push(frames[at : at + PIECE]))
                    first = first or (made and at + PIECE)
                made += len(stream.push(frames[:0], last=True))
                rates.append(made / files.rate / (time.perf_counter() - begin))
            found[f"{threads} threads"] = {
                "seconds_of_sound_a_second": [round(rate, 2) for rate in rates],
                "median": round(median(rates), 2),
                "frames_before_the_first_samples": first,
            }
    text = json.dumps(found, indent=1)
    (HERE / "results" / "codec.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
