"""How far the CPU kernels are from a model's file: log-probabilities beside the reference's.

    python benchmarks/kernel_distance.py [--json FILE] [--table FILE] [--models NAME ...]
        [--peer PYTHON]

The reference has the file's weights exactly, activations and KV in float32. The text is prose: of
four chapters of Python's language reference (`pydoc_data.topics`) the first `--tokens` ids each.
Of every token but a text's first counts |log p − the reference's log p|, in nat: mean, p99 and the
largest; then how far the mean of −log p is off, in per cent, and how many greedy choices differ.
Each type of KV at the best level, each level with the default's KV, and llama.cpp on the same file
(`--peer`: the Python of an environment with cyllama). `--table` writes the result between the marks
of a page.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pydoc_data.topics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.base.config import DEFAULT_MODEL
from headrace.base.groups import graph_groups
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.kernels.arrays import floats
from headrace.kernels.cpu.backend import CpuBackend
from headrace.kernels.cpu.library import LEVELS, level
from headrace.kernels.program import want
from headrace.loader.open import open_model
from headrace.models.registry import describe
from headrace.text.load import load_tokenizer
from headrace.worker.batch import make_batch
from headrace.worker.options import WorkerOptions
from headrace.worker.worker import Worker

MODELS = (DEFAULT_MODEL, "smollm2-135m", "gemma-3-270m")
TOPICS = ("objects", "naming", "import", "customization")
TOKENS, BLOCK = 400, 16
KV = ("float32", "float16", "bfloat16", "int8", "k8v4")
DEFAULT_KV = "bfloat16"
BEGIN, END = "<!-- kernel_distance -->", "<!-- /kernel_distance -->"
PEER = Path(__file__).parent / "peers" / "llama_cpp_logits.py"

Floats = npt.NDArray[np.float64]


class Said(NamedTuple):
    """Answers of one engine for each token of the texts but their first."""

    chosen: Floats
    """Its log-probability."""
    best: npt.NDArray[np.int64]
    """The most likely token in its place."""


def texts(model: str, tokens: int = TOKENS) -> list[list[int]]:
    tokenizer = load_tokenizer(open_model(model).tokenizer)
    prose = [pydoc_data.topics.topics[name] for name in TOPICS]
    return [tokenizer.encode(text, add_bos=True)[:tokens] for text in prose]


def started(model: str, kernels: str, kv_dtype: str, room: int = TOKENS) -> Worker:
    files, blocks = open_model(model), -(-room // BLOCK)
    options = WorkerOptions(
        kernels=kernels, rows=1, step_tokens=room, max_context=room, kv_dtype=kv_dtype
    )
    worker = Worker(files, options)
    groups = graph_groups(describe(files.arch), kv_dtype, blocks + 1)
    worker.allocate(PoolShape(BLOCK, groups))
    mine = list(range(1, blocks + 1))
    worker._tables.write([BlockWrite(0, group, 0, mine) for group in range(len(groups))])
    return worker


def said_by(worker: Worker, given: Sequence[list[int]]) -> Said:
    """Each text as one prompt."""
    chosen, best = [], []
    for tokens in given:
        spec = RequestSpec(SamplingParams(temperature=0.0, max_tokens=1), 0)
        worker._rows.admit(Admission(0, 0, tokens, len(tokens), 0, spec))
        plan = StepPlan(1, rows=[0], starts=[0], counts=[len(tokens)], samples=[True])
        with torch.inference_mode():
            batch = make_batch(plan, None, worker._rows, worker._tables, worker._pool)
            hidden = worker.text.program.step(batch, want(hidden="every")).hidden
            logits = floats(worker.text.program.head(hidden))[:-1]
        worker._rows.release([0])
        highest = logits.max(1)
        total = highest + np.log(np.exp(logits - highest[:, None]).sum(1, dtype=np.float64))
        chosen.append(logits[np.arange(len(logits)), tokens[1:]] - total)
        best.append(logits.argmax(1))
    return Said(np.concatenate(chosen), np.concatenate(best))


def said(model: str, kernels: str, kv_dtype: str, given: Sequence[list[int]]) -> Said:
    worker = started(model, kernels, kv_dtype, max(map(len, given)))
    try:
        return said_by(worker, given)
    finally:
        worker.close()


def distance(got: Said, wanted: Said) -> dict[str, float]:
    off = np.abs(got.chosen - wanted.chosen)
    return {
        "mean": float(off.mean()),
        "p99": float(np.quantile(off, 0.99)),
        "largest": float(off.max()),
        "nll, %": 100 * float(got.chosen.mean() / wanted.chosen.mean() - 1),
        "greedy": int((got.best != wanted.best).sum()),
    }


def by_peer(python: str, model: str, given: Sequence[list[int]]) -> Said:
    command = [python, str(PEER), str(open_model(model).path)]
    done = subprocess.run(
        command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return Said(np.array(found["chosen"]), np.array(found["best"]))


def distances(model: str, tokens: int, peer: str | None) -> dict[str, Any]:
    """The rows of one model."""
    given = texts(model, tokens)
    wanted = said(model, "ref", "float32", given)
    off: dict[str, dict[str, float]] = {}

    def add(name: str, got: Said) -> None:
        off[name] = distance(got, wanted)
        print(model, name, json.dumps(off[name]), flush=True)

    for kv_dtype in KV:
        add(f"KV {kv_dtype}", said(model, "cpu", kv_dtype, given))
    for name in filter(level, LEVELS):
        CpuBackend._level = name
        add(f"level {name}", said(model, "cpu", DEFAULT_KV, given))
    CpuBackend._level = None
    if peer:
        add("llama.cpp", by_peer(peer, model, given))
    return {
        "ids": hashlib.sha256(json.dumps(given).encode()).hexdigest(),
        "tokens": len(wanted.chosen),
        "nll": -float(wanted.chosen.mean()),
        "distances": off,
    }


def as_table(found: dict[str, dict[str, Any]]) -> str:
    """Levels that give what the best one gives are one row with it."""
    lines = ["| | mean | p99 | largest | NLL | greedy choices |", "|---|--:|--:|--:|--:|--:|"]
    for model, one in found.items():
        lines.append(f"| **{model}**, NLL {one['nll']:.3f} | | | | | of {one['tokens']:,} |")
        rows: dict[str, dict[str, float]] = one["distances"]
        served = rows[f"KV {DEFAULT_KV}"]
        for name, row in rows.items():
            if name.startswith("level") and row == served:
                continue
            lines.append(
                f"| {name.replace(DEFAULT_KV, f'{DEFAULT_KV} (default)')} | {row['mean']:.4f} "
                f"| {row['p99']:.2f} | {row['largest']:.2f} | {row['nll, %']:+.2f} % "
                f"| {row['greedy']} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--peer", metavar="PYTHON")
    options = parser.parse_args()
    found = {model: distances(model, options.tokens, options.peer) for model in options.models}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.table:
        head, _, rest = options.table.read_text().partition(BEGIN)
        _, _, tail = rest.partition(END)
        options.table.write_text(f"{head}{BEGIN}\n\n{as_table(found)}\n\n{END}{tail}")


if __name__ == "__main__":
    main()
