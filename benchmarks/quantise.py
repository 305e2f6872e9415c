"""The loss of quantised files, ours and others', against one dense GGUF: KL, perplexity, top token.

Run: `python benchmarks/quantise.py DENSE.gguf --to q4_k [--tokens 32768] [--peer PEER.gguf …]`, or
`--budget 90MB --budget 2ms …` in place of `--to`. DENSE is quantised without a text and on the
built-in text, and to each budget; then the results and each PEER are compared with it on the gate's
windows, through the kernels that serve them, next to the loss that was predicted. For a peer with
the same importance matrix: `--imatrix FILE` keeps ours, and `llama-quantize --imatrix FILE` takes
it in a second run with `--made FOLDER` of the first. `benchmarks/rotated_twin.py` makes a DENSE
whose weights lie on no grid. One JSON line per file: seconds and CPU seconds are of this run, so a
quiet machine is needed for those alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.config import EngineOptions
from headrace.bench.accuracy import stdlib_corpus, windows
from headrace.factory.compare import compare
from headrace.factory.quantise import BUILT_IN, HELD_OUT, NO_TEXT, TARGETS
from headrace.factory.shrink import QuantiseWish, Shrinking
from headrace.factory.to_gguf import MIX
from headrace.loader.open import open_model
from headrace.quantise.text import TOKENS
from headrace.text.load import load_tokenizer

LOSSES: dict[str, Any] = {}


def make(
    dense: Path, out: Path, asked: argparse.Namespace, text: str, budget: str | None
) -> dict[str, Any]:
    """Quantise as the command does, whatever the loss; return what it took."""
    imatrix = asked.imatrix if text == BUILT_IN and budget is None else None
    to, model = MIX if budget else asked.to, EngineOptions(model=str(dense))
    wish = QuantiseWish(model, to, text, asked.tokens, out, 1, imatrix, 0.0, budget)
    began, used = time.time(), time.process_time()
    planned = Shrinking(wish)
    planned.__dict__ |= LOSSES  # All budgets choose by the same.
    report = planned.run()
    if budget:
        LOSSES["losses"] = planned.losses
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": round(time.time() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        "peak_MB": peak >> 10,
        "text": report.get("text"),
        **({"predicted_kl": report["predicted_kl"]} if budget else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dense", type=Path)
    parser.add_argument("--to", choices=TARGETS, default="q4_k")
    parser.add_argument("--budget", action="append", default=[])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    held_out = range(1, HELD_OUT[1] + 1)  # More would be windows that the calibration reads.
    parser.add_argument("--windows", type=int, choices=held_out, default=HELD_OUT[1])
    parser.add_argument("--peer", type=Path, action="append", default=[])
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--made", type=Path, help="Folder to keep results in, and to find them.")
    asked = parser.parse_args()
    original = open_model(str(asked.dense))
    tokenizer = load_tokenizer(original.tokenizer, original.arch.vocab_size)
    pieces = windows(stdlib_corpus()[0], HELD_OUT[0], asked.windows)
    text = [np.array(tokenizer.encode(one, add_bos=True), np.int64) for one in pieces]
    with tempfile.TemporaryDirectory() as name:
        folder = asked.made or Path(name)
        folder.mkdir(exist_ok=True)
        recipes = [(BUILT_IN, budget) for budget in asked.budget]
        for kind, budget in recipes or [(NO_TEXT, None), (BUILT_IN, None)]:
            out = folder / f"{budget or asked.to}-{kind}.gguf"
            took = {} if out.exists() else make(asked.dense, out, asked, kind, budget)
            print(
                json.dumps({"file": out.name, **took, **figures(original, out, text)}), flush=True
            )
        for peer in asked.peer:
            print(json.dumps({"file": peer.name, **figures(original, peer, text)}), flush=True)


def figures(original: Any, path: Path, text: list[Any]) -> dict[str, Any]:
    """Return bytes and losses of a file."""
    found = compare(original, open_model(str(path)), text).said()
    return {"bytes": path.stat().st_size, **found}


if __name__ == "__main__":
    main()
