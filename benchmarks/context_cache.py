"""What the disk tier saves after a restart: time to the first token, and the rate of the loads.

Run: `python benchmarks/context_cache.py OUT.json [--tokens 2048]`. Each life of an engine is a
process of its own, with a cache folder that begins empty; the models are those of the user's cache.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrace import LLM, SamplingParams
from headrace.base.environment import cache_root

SHARED = 1024
SHARERS = 16


def life(folder: Path, tokens: int) -> dict[str, float]:
    """One engine: the known prompt's first token, then sixteen that share a prefix, twice."""
    rng = random.Random(5)
    prompt = [rng.randrange(1000, 50000) for _ in range(tokens)]
    shared = [rng.randrange(1000, 50000) for _ in range(SHARED)]
    with LLM(context_cache="4GiB", cache_dir=str(folder)) as llm:
        built = llm._built
        assert built is not None
        assert built.context is not None
        built.context.settle()
        llm.generate([[1] * 12], SamplingParams(max_tokens=4))
        first = SamplingParams(max_tokens=1, temperature=0.0)
        found = {"first_token": timed(lambda: llm.generate([prompt], first))}
        found["first_token_from_the_pool"] = timed(lambda: llm.generate([prompt], first))
        several = [[*shared, number] for number in range(SHARERS)]
        answers = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
        found["sixteen"] = timed(lambda: llm.generate(several, answers))
        found["sixteen_from_the_pool"] = timed(lambda: llm.generate(several, answers))
        built.context.settle()
        tier = built.context.tiers.stats
        found |= {"loaded_bytes": tier.loaded_bytes, "load_seconds": tier.load_seconds}
        found |= {"loads": tier.loads, "wrong": tier.wrong, "kept_bytes": tier.kept_bytes}
    return found


def timed(work: object) -> float:
    begin = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--life", type=Path)
    given = parser.parse_args()
    if given.life is not None:
        given.out.write_text(json.dumps(life(given.life, given.tokens)))
        return
    lives = []
    with tempfile.TemporaryDirectory() as folder:
        for kept in ("models", "panels", "hardware"):
            if (cache_root() / kept).exists():
                (Path(folder) / kept).symlink_to(cache_root() / kept)
        for _ in range(2):
            command = [sys.executable, __file__, str(given.out), "--life", folder]
            subprocess.run([*command, "--tokens", str(given.tokens)], check=True)
            lives.append(json.loads(given.out.read_text()))
    cold, again = lives
    ratio = cold["first_token"] / again["first_token"]
    shared = again["sixteen_from_the_pool"] / again["sixteen"]  # Of one life: loads differ.
    record = {"tokens": given.tokens, "empty": cold, "restarted": again}
    record |= {"first_token_ratio": ratio, "sixteen_against_warm_pool": shared}
    given.out.write_text(json.dumps(record, indent=1))
    print(
        f"first token ×{ratio:.1f} sooner after a restart; sixteen at {shared:.2f} of a warm pool"
    )


if __name__ == "__main__":
    main()
