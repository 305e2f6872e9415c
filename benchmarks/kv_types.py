"""What each type of KV costs the default model: perplexity, bytes a token, decoding a long context.

    python benchmarks/kv_types.py [--json FILE] [--only perplexity|decoding] [--contexts 8192 32768]
        [--types int8 k8v4] [--rows 1] [--steps 40] [--large N]

Perplexity is over windows of 512 tokens of Python's library, docstrings and code, each beside that
of fp32 KV (mean and standard error of the windows' differences). Decoding is a token of each row
behind pages filled by chance, the types in turns, step by step, beside what their bytes say.
`--large` is `key_bias.LARGE`: from which length on a bias of K is left out of int8 codes; a huge
one leaves all in.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.config import DEFAULT_MODEL
from headrace.base.groups import graph_groups, pool_bytes
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.kernels import key_bias
from headrace.kernels.arrays import floats
from headrace.kernels.cpu.library import Team, allocate
from headrace.kernels.program import want
from headrace.loader.open import open_model
from headrace.models.registry import describe
from headrace.text.load import load_tokenizer
from headrace.worker.batch import make_batch
from headrace.worker.kv_tensors import arrays_of
from headrace.worker.options import WorkerOptions
from headrace.worker.worker import Worker

TYPES = ("float32", "float16", "bfloat16", "int8", "k8v4")
LONG = ("bfloat16", "int8", "k8v4")
"""Types whose steps behind a long context are timed."""
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


def start(kv_dtype: str, context: int, rows: int = 1) -> Worker:
    files = open_model(DEFAULT_MODEL)
    options = WorkerOptions(
        kernels="cpu", rows=rows, step_tokens=CHUNK, max_context=context, kv_dtype=kv_dtype
    )
    worker = Worker(files, options)
    each = context // BLOCK
    worker.allocate(PoolShape(BLOCK, graph_groups(describe(files.arch), kv_dtype, rows * each + 1)))
    for row in range(rows):
        first = 1 + row * each
        worker._tables.write([BlockWrite(row, 0, 0, list(range(first, first + each)))])
    return worker


def admit(worker: Worker, tokens: list[int], most: int, row: int = 0) -> None:
    spec = RequestSpec(SamplingParams(temperature=0.0, max_tokens=most), 0)
    worker._rows.admit(Admission(row, row, tokens, len(tokens), 0, spec))


def surprise(worker: Worker, tokens: list[int]) -> float:
    """Mean of −log p over every token but the first."""
    admit(worker, tokens, 1)
    plan = StepPlan(1, rows=[0], starts=[0], counts=[len(tokens)], samples=[True])
    batch = make_batch(plan, None, worker._rows, worker._tables, worker._pool)
    hidden = worker.text.program.step(batch, want(hidden="every")).hidden
    logits = floats(worker.text.program.head(hidden))[:-1].astype(np.float64)
    worker._rows.release([0])
    highest = logits.max(1)
    total = highest + np.log(np.exp(logits - highest[:, None]).sum(1))
    return float((total - logits[np.arange(len(logits)), tokens[1:]]).mean())


def perplexities(types: Sequence[str]) -> dict[str, dict[str, float]]:
    """Window by window all types, so that what is said after any number of them compares alike."""
    workers = {kv_dtype: start(kv_dtype, WINDOW) for kv_dtype in dict.fromkeys(["float32", *types])}
    lost: dict[str, list[float]] = {kv_dtype: [] for kv_dtype in workers}
    found: dict[str, dict[str, float]] = {}
    for text in windows():
        for kv_dtype, worker in workers.items():
            lost[kv_dtype].append(surprise(worker, text))
        for kv_dtype, each in lost.items():
            off = np.array(each) - np.array(lost["float32"])
            found[kv_dtype] = {
                "windows": len(each),
                "perplexity": math.exp(statistics.fmean(each)),
                "above fp32, %": 100 * math.expm1(off.mean()),
                "standard error, %": 100 * float(off.std()) / len(each) ** 0.5,
            }
        said = {kv_dtype: round(one["above fp32, %"], 3) for kv_dtype, one in found.items()}
        print(len(lost["float32"]), json.dumps(said), flush=True)
    for worker in workers.values():
        worker.close()
    return found


def decoding(types: Sequence[str], contexts: list[int], rows: int, steps: int) -> dict[str, Any]:
    """Steps of `rows` rows behind so many tokens each, the types in turns, step by step; and what
    the bytes say: a step behind one block, and the KV at the rate of one read of a buffer."""
    found: dict[str, Any] = {}
    team, buffer = Team(os.cpu_count() or 1), allocate(256 << 20)
    buffer[:] = 1
    for context in contexts:
        room = context + -(-2 * (steps + 8) // BLOCK) * BLOCK
        workers = {kv_dtype: start(kv_dtype, room, rows) for kv_dtype in types}
        for worker in workers.values():
            fill(worker)
            for row in range(rows):
                admit(worker, [1] * context, steps + 8, row)
        took: dict[str, list[float]] = {kv_dtype: [] for kv_dtype in types}
        short: dict[str, list[float]] = {kv_dtype: [] for kv_dtype in types}
        rates = []
        for turn in range(steps):
            for kv_dtype, worker in workers.items():
                took[kv_dtype].append(step(worker, context + turn, rows, turn))
                short[kv_dtype].append(step(worker, BLOCK, rows, turn))
            rates.append(team.read_bandwidth(buffer))
        rate = statistics.median(rates)
        for kv_dtype in types:
            each = token_bytes(kv_dtype)
            below = statistics.median(short[kv_dtype])
            ratios = [a / b for a, b in zip(took[kv_dtype], took[types[0]], strict=True)]
            found.setdefault(kv_dtype, {})[str(context)] = {
                "step, ms, median": statistics.median(took[kv_dtype]),
                "step, ms, least": min(took[kv_dtype]),
                "behind one block, ms, median": below,
                "of the first type's step, median": statistics.median(ratios),
                "KV, MB": rows * context * each / 1e6,
                "what the bytes say, ms": below + 1e3 * rows * context * each / rate,
                "one read, GB/s": rate / 1e9,
            }
            print(f"{rows} x {context}", kv_dtype, json.dumps(found[kv_dtype][str(context)]))
        for worker in workers.values():
            worker.close()
    return found


def token_bytes(kv_dtype: str) -> float:
    """Bytes that a token of the default model's context takes, in all layers."""
    groups = graph_groups(describe(open_model(DEFAULT_MODEL).arch), kv_dtype, 1)
    return pool_bytes(PoolShape(BLOCK, groups)) / BLOCK


def fill(worker: Worker) -> None:
    """Numbers by chance in every page, as if a context had been computed."""
    chance = np.random.default_rng(0)
    for layer in worker.cache.layers:
        for array in arrays_of(layer):
            raw = array.reshape(-1)
            if array.dtype == np.uint16:  # bf16 between 1/256 and 1/64, either sign
                low, high = 0x3B80, 0x3C80
                raw[:] = chance.integers(low, high, len(raw), np.uint16, endpoint=True)
                if array.ndim == 4:
                    raw |= chance.integers(0, 2, len(raw), np.uint16) << 15
            else:
                raw.view(np.uint8)[:] = chance.integers(0, 255, len(raw), np.uint8)


def step(worker: Worker, at: int, rows: int, turn: int) -> float:
    """Milliseconds of one token of each row behind `at`."""
    ones = [1] * rows
    plan = StepPlan(turn + 1, list(range(rows)), [at] * rows, ones, [True] * rows)
    began = time.perf_counter()
    worker.execute(plan)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("perplexity", "decoding"))
    parser.add_argument("--types", nargs="+", choices=TYPES)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--large", type=float, default=key_bias.LARGE)
    options = parser.parse_args()
    key_bias.LARGE = options.large
    found: dict[str, dict[str, Any]] = {
        kv_dtype: {"bytes a token": token_bytes(kv_dtype)} for kv_dtype in TYPES
    }
    if options.only != "decoding":
        for kv_dtype, each in perplexities(options.types or TYPES).items():
            found[kv_dtype] |= each
    if options.only != "perplexity":
        types, rows = options.types or LONG, options.rows
        for kv_dtype, steps in decoding(types, options.contexts, rows, options.steps).items():
            found[kv_dtype] |= {f"decoding {rows} rows": steps}
    for kv_dtype in TYPES:
        print(kv_dtype, json.dumps(found[kv_dtype]))
    if options.json:
        about = {"steps": options.steps, "large": options.large}
        options.json.write_text(json.dumps(about | {"types": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
