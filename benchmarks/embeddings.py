"""Embeddings a second of `all-minilm-l6-v2` in one process, beside another version in turns.

    python benchmarks/embeddings.py [--against SITE] [--rounds 9] [--check] [--json FILE]

SITE is a folder with another version of the package (`pip install --no-deps --target SITE .` in its
checkout). Each version has a process of its own that idles while the other is measured; they take
turns case by case, and which begins changes every round. A case is a number of texts of about so
many tokens in one call of `LLM.embed`; the figure is the median of the rounds, the ratio the median
of the rounds' ratios. `--check` compares the vectors with those of transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

MODEL = "all-minilm-l6-v2"
THREADS = 2
CASES = {"1 short": (1, 12), "32 short": (32, 12), "8 long": (8, 250), "32 mixed": (32, 0)}
"""Name → texts, words in each; 0: 3 to 240."""
SENTENCE = (
    "the river carries water to a mill where old stone wheels grind wheat for bread and people "
    "come from the town with carts horses children stories songs about rain snow wind fire harvest"
)
CHILD = """
import json, sys, time
if sys.argv[3]:  # An editable install would be found first.
    sys.meta_path[:] = [each for each in sys.meta_path if "Editable" not in type(each).__name__
                        and "Redirecting" not in type(each).__name__]
    sys.path.insert(0, sys.argv[3])
import headrace
from headrace import LLM
llm = LLM(sys.argv[1], threads=int(sys.argv[2]), device="cpu", offline=True)
print(headrace.__file__, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    best, spent, calls = [], 0.0, 0
    while not calls or spent < asked["seconds"]:
        begin = time.perf_counter()
        outputs = llm.embed(asked["texts"])
        took = time.perf_counter() - begin
        spent, calls = spent + took, calls + 1
        best.append(took)
    best.sort()
    tokens = sum(len(each.prompt_token_ids) for each in outputs)
    vectors = [each.vector for each in outputs] if asked["vectors"] else None
    print(json.dumps({"seconds": best[len(best) // 2], "tokens": tokens, "vectors": vectors}),
          flush=True)
"""


def texts_of(count: int, words: int) -> list[str]:
    rng, known = random.Random(count + words), SENTENCE.split()
    return [
        " ".join(rng.choice(known) for _ in range(words or rng.randint(3, 240)))
        for _ in range(count)
    ]


class Version:
    """One version of the package in a process of its own."""

    def __init__(self, site: Path | None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, MODEL, str(THREADS), str(site or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        file = Path(self._read().strip())
        if site is not None and site.resolve() not in file.resolve().parents:
            raise SystemExit(f"{site}: holds no headrace; {file} was found")

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a version ended early; its error stands above")
        return line

    def measure(self, texts: list[str], seconds: float, *, vectors: bool = False) -> dict[str, Any]:
        """{seconds of the median call, tokens of all texts, vectors or None}."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"texts": texts, "seconds": seconds, "vectors": vectors}) + "\n"
        )
        self._process.stdin.flush()
        return cast(dict[str, Any], json.loads(self._read()))

    def close(self) -> None:
        self._process.communicate(timeout=30)


def furthest(texts: list[str], vectors: list[list[float]]) -> float:
    """The largest difference of an element from transformers' in fp32."""
    import torch
    import transformers

    from headrace.loader.open import open_model

    path = open_model(MODEL).path
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    worst = 0.0
    for text, found in zip(texts, vectors, strict=True):
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt", truncation=True))
        wanted = states.last_hidden_state[0].mean(0)
        wanted = wanted / wanted.norm()
        worst = max(worst, float((torch.tensor(found) - wanted).abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, metavar="SITE")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each case and turn")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    versions = {"now": Version(None)}
    if arguments.against is not None:
        versions["before"] = Version(arguments.against)
    result: dict[str, Any] = {"model": MODEL, "threads": THREADS, "rounds": arguments.rounds}
    took: dict[str, dict[str, list[float]]] = {
        case: {name: [] for name in versions} for case in CASES
    }
    tokens: dict[str, int] = {}
    for turn in range(arguments.rounds + 1):
        for case, shape in CASES.items():
            for name in sorted(versions, reverse=bool(turn % 2)):
                found = versions[name].measure(texts_of(*shape), arguments.seconds)
                tokens[case] = found["tokens"]
                if turn:  # The first one warms up.
                    took[case][name].append(found["seconds"])
    for case, (count, _) in CASES.items():
        line: dict[str, Any] = {"texts": count, "tokens": tokens[case]}
        for name, seconds in took[case].items():
            middle = statistics.median(seconds)
            line[name] = {"embeddings_per_s": count / middle, "tokens_per_s": tokens[case] / middle}
        if "before" in versions:
            ratios = [b / a for a, b in zip(took[case]["now"], took[case]["before"], strict=True)]
            line["ratio"] = statistics.median(ratios)
            line["ratios"] = [min(ratios), max(ratios)]
        result[case] = line
        shown = ", ".join(
            f"{name} {line[name]['embeddings_per_s']:,.1f}/s ({line[name]['tokens_per_s']:,.0f} "
            "tokens/s)"
            for name in versions
        )
        print(f"{case:9} {tokens[case]:5} tokens: {shown}", end="")
        print(f", ×{line['ratio']:.2f}" if "ratio" in line else "")
    if arguments.check:
        texts = [text for shape in CASES.values() for text in texts_of(*shape)]
        vectors = versions["now"].measure(texts, 0.0001, vectors=True)["vectors"]
        result["furthest"] = furthest(texts, vectors)
        print(f"furthest from transformers: {result['furthest']:.2e}")
    for version in versions.values():
        version.close()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
