"""Where the resident memory of the default model lies, from the start to 32 concurrent requests.

    python benchmarks/memory.py [--json FILE]

The same work as in `cpu_peers.py` up to its row of memory: 8, 16 and 32 requests at once, of 128
fresh random ids and 128 tokens each. `resident` counts every page that the process has mapped, as
all peers' figures do; `proportional` (Linux's PSS) counts a page that n processes map for 1/n.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

KINDS = (
    (re.compile(r"\.panels$"), "weights in panels"),
    (re.compile(r"\.gguf$"), "model file"),
    (re.compile(r"/dev/zero|\(deleted\)"), "KV"),
    (re.compile(r"libtorch"), "torch's libraries"),
    (re.compile(r"^/"), "other files"),
    (re.compile(r"heap"), "heap"),
)


def by_kind() -> dict[str, float]:
    """MiB of this process's mappings."""
    found: Counter[str] = Counter()
    kind = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            path = words[5] if len(words) > 5 else ""
            kind = next((name for known, name in KINDS if known.search(path)), "anonymous")
        elif words[0] == "Rss:":
            found[kind] += int(words[1])
    return {name: round(size / 1024, 1) for name, size in found.most_common()}


def sizes() -> dict[str, Any]:
    lines = Path("/proc/self/status").read_text().splitlines()
    status = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return {
        "peak": round(int(status["VmHWM"]) / 1024, 1),
        "resident": round(int(status["VmRSS"]) / 1024, 1),
        "proportional": round(pss / 1024, 1),
        "by_kind": by_kind(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    from headrace import LLM, SamplingParams

    llm = LLM(threads=2, max_context=4096, offline=True)
    stages = {"started": sizes()}
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    for level in (8, 16, 32):
        prompts = [[random.randrange(1_000, 100_000) for _ in range(128)] for _ in range(level)]
        llm.generate(prompts, params)
        stages[f"{level} concurrent"] = sizes()
    llm.close()
    for name, found in stages.items():
        print(f"{name}: {json.dumps(found)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(stages, indent=1) + "\n")


if __name__ == "__main__":
    main()
