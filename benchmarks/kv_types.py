"""What each type of KV costs the default model: perplexity, bytes a token, decoding a long context.

    python benchmarks/kv_types.py [--json FILE] [--context 8192] [--steps 40] [--large N]

Perplexity is over windows of 512 tokens of Python's library, docstrings and code, each beside that
of fp32 KV (mean and standard error of the windows' differences). Decoding is one row behind a
context of random tokens, the types in turns, step by step. `--large` is `key_bias.LARGE`: from
which length on a bias of K is left out of int8 codes; a huge one leaves all in.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.config import DEFAULT_MODEL
from headrace.base.groups import layer_groups, pool_bytes
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.kernels import key_bias
from headrace.kernels.arrays import floats
from headrace.kernels.program import want
from headrace.loader.open import open_model
from headrace.text.load import load_tokenizer
from headrace.worker.batch import make_batch
from headrace.worker.options import WorkerOptions
from headrace.worker.worker import Worker

TYPES = ("float32", "float16", "bfloat16", "int8", "k8v4")
WINDOW, CHUNK, BLOCK = 512, 1024, 16
MODULES = {
    "docstrings": "argparse csv datetime decimal difflib inspect logging shutil socket statistics "
    "subprocess tarfile threading typing unittest zipfile",
    "code": "argparse bisect csv fractions heapq queue random sched shutil statistics string "
    "tempfile textwrap threading zipfile",
}


def windows() -> Iterator[list[int]]:
    """The begins of modules' texts, as far as they have a window's length."""
    tokenizer = load_tokenizer(open_model(DEFAULT_MODEL).tokenizer)
    holders = ast.Module | ast.ClassDef | ast.FunctionDef
    for kind, names in MODULES.items():
        for name in names.split():
            found = importlib.util.find_spec(name)
            assert found is not None
            assert found.origin is not None
            text = Path(found.origin).read_text()
            if kind == "docstrings":
                nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, holders))
                text = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
            tokens = tokenizer.encode(text)[:WINDOW]
            if len(tokens) == WINDOW:
                yield tokens


def start(kv_dtype: str, context: int) -> Worker:
    files = open_model(DEFAULT_MODEL)
    options = WorkerOptions(
        kernels="cpu", rows=1, step_tokens=CHUNK, max_context=context, kv_dtype=kv_dtype
    )
    worker = Worker(files, options)
    blocks = context // BLOCK + 1
    worker.allocate(PoolShape(BLOCK, layer_groups(files.arch, kv_dtype, blocks)))
    worker._tables.write([BlockWrite(0, 0, 0, list(range(1, blocks)))])
    return worker


def admit(worker: Worker, tokens: list[int], most: int) -> None:
    spec = RequestSpec(SamplingParams(temperature=0.0, max_tokens=most), 0)
    worker._rows.admit(Admission(0, 0, tokens, len(tokens), 0, spec))


def surprise(worker: Worker, tokens: list[int]) -> float:
    """Mean of −log p over every token but the first."""
    admit(worker, tokens, 1)
    plan = StepPlan(1, rows=[0], starts=[0], counts=[len(tokens)], samples=[True])
    batch = make_batch(plan, None, worker._rows, worker._tables, worker._pool)
    hidden = worker._program.step(batch, want(hidden="every")).hidden
    logits = floats(worker._program.head(hidden))[:-1].astype(np.float64)
    worker._rows.release([0])
    highest = logits.max(1)
    total = highest + np.log(np.exp(logits - highest[:, None]).sum(1))
    return float((total - logits[np.arange(len(logits)), tokens[1:]]).mean())


def perplexities() -> dict[str, dict[str, float]]:
    texts = list(windows())
    means = {}
    for kv_dtype in TYPES:
        worker = start(kv_dtype, WINDOW)
        means[kv_dtype] = np.array([surprise(worker, text) for text in texts])
        worker.close()
        off = means[kv_dtype] - means["float32"]
        print(f"{kv_dtype}: {100 * math.expm1(off.mean()):+.3f} %", flush=True)
    return {
        kv_dtype: {
            "windows": len(texts),
            "perplexity": math.exp(each.mean()),
            "above fp32, %": 100 * math.expm1((each - means["float32"]).mean()),
            "standard error, %": 100 * float((each - means["float32"]).std()) / len(texts) ** 0.5,
        }
        for kv_dtype, each in means.items()
    }


def decoding(context: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of each step of one row behind `context` tokens, the types in turns."""
    tokens = np.random.default_rng(0).integers(0, 150_000, context).tolist()
    room = context + -(-2 * (steps + 8) // BLOCK) * BLOCK
    workers, took = {}, {}
    for kv_dtype in TYPES:
        workers[kv_dtype], took[kv_dtype] = start(kv_dtype, room), []
        admit(workers[kv_dtype], tokens, steps + 8)
        for at in range(0, context, CHUNK):
            step(workers[kv_dtype], at, min(CHUNK, context - at), samples=at + CHUNK >= context)
    for turn in range(steps):
        for kv_dtype, worker in workers.items():
            began = time.perf_counter()
            step(worker, context + turn, 1, samples=True)
            took[kv_dtype].append(1e3 * (time.perf_counter() - began))
    return took


def step(worker: Worker, at: int, count: int, *, samples: bool) -> None:
    plan = StepPlan(at + 1, rows=[0], starts=[at], counts=[count], samples=[samples])
    worker.execute(plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--large", type=float, default=key_bias.LARGE)
    options = parser.parse_args()
    key_bias.LARGE = options.large
    arch = open_model(DEFAULT_MODEL).arch
    found: dict[str, Any] = {}
    accuracy, took = perplexities(), decoding(options.context, options.steps)
    for kv_dtype in TYPES:
        bytes_token = pool_bytes(PoolShape(BLOCK, layer_groups(arch, kv_dtype, 1))) / BLOCK
        ratios = [ours / bf16 for ours, bf16 in zip(took[kv_dtype], took["bfloat16"], strict=True)]
        found[kv_dtype] = accuracy[kv_dtype] | {
            "bytes a token": bytes_token,
            "step, ms, median": statistics.median(took[kv_dtype]),
            "step, ms, least": min(took[kv_dtype]),
            "of bf16's step, median": statistics.median(ratios),
        }
        print(kv_dtype, json.dumps(found[kv_dtype]))
    if options.json:
        about = {"context": options.context, "steps": options.steps, "large": options.large}
        options.json.write_text(json.dumps(about | {"types": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
