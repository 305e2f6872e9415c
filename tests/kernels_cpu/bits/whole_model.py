"""Greedy tokens of a model by this machine's best level, to be compared with another machine's.

Run: `python tests/kernels_cpu/bits/whole_model.py MODEL.gguf`, and the same by a Python for aarch64
in an emulator: `qemu-aarch64 -cpu neoverse-n1 -L ROOT ROOT/usr/bin/python3.11 …`, where ROOT has
Python of Debian's arm64 packages and the cross compiler's C library, PYTHONPATH the wheels of
numpy, msgspec, jinja2, markupsafe, regex and safetensors for aarch64 and a copy of `src`
with the libraries of `build/cpu-aarch64`. Beside the tokens it prints a digest of the kept panels,
which the packers of both machines must have written alike; HEADRACE_CACHE should name an empty
folder.
"""

from __future__ import annotations

import hashlib
import platform
import sys

from headrace import LLM, SamplingParams
from headrace.base.environment import cache_root
from headrace.kernels.cpu import library
from headrace.loader.panelfile import HUGE

PROMPTS = ("def fibonacci(n):", "The capital of France is")
TOKENS = 12


def main() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(sys.argv[1], max_context=256, max_sequences=2, threads=2) as llm:
        print(platform.machine(), library.level())
        for prompt in PROMPTS:
            print(llm.generate([prompt], greedy)[0].outputs[0].token_ids, flush=True)
    for file in sorted((cache_root() / "panels").glob("*.panels")):
        with file.open("rb") as kept:
            kept.seek(HUGE)  # behind the head, which names the file that was packed
            print("panels", hashlib.file_digest(kept, "sha256").hexdigest()[:16])


if __name__ == "__main__":
    main()
