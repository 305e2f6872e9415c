"""The loss of quantised files, ours and others', against one dense model: KL and top tokens.

Run: `python benchmarks/quantise.py DENSE.gguf --to q4_k [--tokens 32768] [--peer PEER.gguf …]`, or
`--budget 90MB --budget 2ms …` in place of `--to`. DENSE is quantised on the built-in text (also
without one by `--bare`), or to each budget; then results and each PEER are compared with it on the
gate's windows, through the kernels that serve them, with the predicted time of a decode step.
`--match` makes that of each PEER a budget. `--llama libllama.so --imatrix FILE` has llama-quantize
make a peer with our matrix and types (`peers/quantise_peer.py`). Other peers read `windows.json` of
`--made FOLDER`; a second run with it compares them. A DENSE folder is what `headrace convert` makes
of a GGUF. `--json FILE` adds the figures to FILE. `benchmarks/rotated_twin.py` makes a DENSE whose
weights lie on no grid.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.config import EngineOptions
from headrace.bench.accuracy import stdlib_corpus, windows
from headrace.engine.simulator.described import make_case
from headrace.factory.compare import compare
from headrace.factory.quantise import BUILT_IN, HELD_OUT, NO_TEXT, TARGETS, text_of
from headrace.factory.shrink import QuantiseWish, Shrinking
from headrace.factory.to_gguf import MIX
from headrace.loader.open import open_model
from headrace.quantise.text import TOKENS, sample
from headrace.roofline.composition import decode_step
from headrace.roofline.hardware_files import find_hardware
from headrace.roofline.machine import calibration_path
from headrace.roofline.step import step_time
from headrace.text.load import load_tokenizer

PEER = Path(__file__).parent / "peers" / "quantise_peer.py"


def make(out: Path, asked: argparse.Namespace, text: str, budget: str | None) -> dict[str, Any]:
    """Quantise as the command does, whatever the loss; return what it took."""
    imatrix = asked.imatrix if text == BUILT_IN and budget is None else None
    to, model = MIX if budget else asked.to, EngineOptions(model=str(asked.dense))
    wish = QuantiseWish(model, to, text, asked.tokens, out, 1, imatrix, 0.0, budget)
    began, used = time.time(), time.process_time()
    report = Shrinking(wish).run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": round(time.time() - began, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        "peak_MB": peak >> 10,
        **{name: report[name] for name in ("text", "predicted_kl") if name in report},
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
    parser.add_argument("--match", action="store_true", help="Budgets: the peers' decode times.")
    parser.add_argument("--bare", action="store_true", help="Also quantise without a text.")
    for name in ("--imatrix", "--json", "--llama"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--made", type=Path, help="Folder to keep results in, and to find them.")
    asked = parser.parse_args()
    original = open_model(str(asked.dense))
    tokenizer = load_tokenizer(original.tokenizer, original.arch.vocab_size)
    pieces = windows(stdlib_corpus()[0], HELD_OUT[0], asked.windows)
    text = [np.array(tokenizer.encode(one, add_bos=True), np.int64) for one in pieces]
    with tempfile.TemporaryDirectory() as name:
        folder = asked.made or Path(name)
        folder.mkdir(exist_ok=True)
        whole = text_of(BUILT_IN, asked.windows)
        assert whole is not None
        same = [one.tolist() for one in sample(whole, original, asked.tokens).windows]
        (folder / "windows.json").write_text(json.dumps(same))
        budgets = [*asked.budget, *(f"{step_of(one)}ms" for one in asked.peer if asked.match)]
        recipes = [(BUILT_IN, budget) for budget in budgets]
        ending = ".gguf" if asked.dense.is_file() else ""
        files: list[tuple[Path, dict[str, Any]]] = []
        for kind, budget in recipes or [*[(NO_TEXT, None)] * asked.bare, (BUILT_IN, None)]:
            out = folder / f"{budget or asked.to}-{kind}{ending}"
            files.append((out, {} if out.exists() else make(out, asked, kind, budget)))
        if asked.llama:
            peer = folder / f"llama-{files[-1][0].name}"
            words = (asked.dense, asked.imatrix, peer, asked.llama, asked.to.upper(), "--like")
            command = [sys.executable, PEER, *words, files[-1][0]]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            files.append((peer, json.loads(said.splitlines()[-1])))
        rows = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else []
        for path, took in [*files, *((one, {}) for one in asked.peer)]:
            rows.append({"file": path.name, **took, **figures(original, path, text)})
            print(json.dumps(rows[-1]), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(rows, indent=1) + "\n")


def step_of(path: Path) -> float:
    """Predict the milliseconds of a decode step as `--budget` does."""
    hardware = find_hardware("this", calibration_path())
    case = make_case(str(path), hardware)
    step = decode_step(case.arch, 1, min(1024, case.arch.max_context - 1))
    return round(1e3 * step_time(case, hardware, step).seconds, 4)


def figures(original: Any, path: Path, text: list[Any]) -> dict[str, Any]:
    """Return bytes and losses of a file."""
    found = compare(original, open_model(str(path)), text).said()
    files = [path] if path.is_file() else path.glob("*.safetensors")
    size = sum(one.stat().st_size for one in files)
    step = {"decode_ms": step_of(path)} if calibration_path().is_file() else {}
    return {"bytes": size, **step, **found}


if __name__ == "__main__":
    main()
