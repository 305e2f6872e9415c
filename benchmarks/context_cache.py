"""What the disk tier saves after a restart: time to the first token, and the rate of the loads.

Run: `python benchmarks/context_cache.py OUT.json [--tokens 2048]`. Each life of an engine is a
process of its own, with a cache folder that begins empty; the models are those of the user's cache.
`--llama PATH/llama-server` measures its slot restore of the same prompt beside that.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.base.config import EngineOptions
from headrace.base.environment import cache_root
from headrace.loader import open_model

SHARED = 1024
SHARERS = 16


def life(folder: Path, tokens: int) -> dict[str, float]:
    """One engine: the known prompt's first token, then sixteen that share a prefix, twice."""
    prompt, shared = random_prompt(5, tokens), random_prompt(6, SHARED)
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


def random_prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 50000) for _ in range(tokens)]


def llama_life(server: Path, folder: Path, model: str, tokens: int, *, save: bool) -> float:
    """Seconds to the first token of llama.cpp: of computing, which is saved, or of a restore."""
    with llama(server, folder, model, tokens) as ask:
        ask("/completion", prompt=[1] * 12, n_predict=4)
        begin = time.perf_counter()
        if not save:
            ask("/slots/0?action=restore", filename="known")
        ask("/completion", prompt=random_prompt(5, tokens), n_predict=1, cache_prompt=True)
        seconds = time.perf_counter() - begin
        if save:
            ask("/slots/0?action=save", filename="known")
    return seconds


@contextmanager
def llama(server: Path, folder: Path, model: str, tokens: int) -> Iterator[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server, "-m", model, "-c", str(tokens + 256), "-np", "1", "-t", "2"]
    command += ["--slot-save-path", f"{folder}/", "--host", "127.0.0.1", "--port", str(port)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path: str, **body: Any) -> Any:
        sent = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
        sent.data = json.dumps(body).encode() if body else None
        sent.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(sent, timeout=120) as answer:
            return json.load(answer)

    try:
        for _ in range(600):
            with suppress(OSError):
                ask("/health")
                break
            time.sleep(0.05)
        yield ask
    finally:
        child.terminate()
        child.wait()


def timed(work: object) -> float:
    begin = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--life", type=Path)
    given = parser.parse_args()
    if given.life is not None:
        given.out.write_text(json.dumps(life(given.life, given.tokens)))
        return
    lives, restores = [], []
    with tempfile.TemporaryDirectory() as folder:
        for kept in ("models", "panels", "hardware"):
            if (cache_root() / kept).exists():
                (Path(folder) / kept).symlink_to(cache_root() / kept)
        model = str(open_model(EngineOptions().model, offline=True).weights[0])
        for number in range(1 + given.restarts):
            command = [sys.executable, __file__, str(given.out), "--life", folder]
            subprocess.run([*command, "--tokens", str(given.tokens)], check=True)
            lives.append(json.loads(given.out.read_text()))
            if given.llama is not None:
                theirs = Path(folder), model, given.tokens
                restores.append(llama_life(given.llama, *theirs, save=not number))
    cold, again = lives[0], lives[1:]
    first = statistics.median(one["first_token"] for one in again)
    # Of one life each: loads differ.
    shared = statistics.median(one["sixteen_from_the_pool"] / one["sixteen"] for one in again)
    record = {"tokens": given.tokens, "empty": cold, "restarted": again}
    record |= {"first_token_ratio": cold["first_token"] / first}
    record |= {"sixteen_against_warm_pool": shared}
    if restores:
        record["llama"] = {"computed": restores[0], "restored": restores[1:]}
    given.out.write_text(json.dumps(record, indent=1))
    print(
        f"first token in {first:.3f} s after a restart, ×{record['first_token_ratio']:.1f} sooner"
    )
    print(f"sixteen at {shared:.2f} of a warm pool")
    if restores:
        print(f"llama.cpp: {statistics.median(restores[1:]):.3f} s, {restores[0]:.3f} s computed")


if __name__ == "__main__":
    main()
