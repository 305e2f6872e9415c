"""Whether the simulator foretells what drafts gain: its ratios beside those that were measured.

Run: `python benchmarks/speculation_simulated.py [--json FILE]`.

Held out: the laws of drafts (`engine/draft_law.py`) come from recorded answers along which drafters
walked, and the measured ratios (`results/speculation_speed.json`) from other prompts, which two
engines answered whole. Of each class that was measured, simulated are first turns of the same kind,
so many at a time, with as many tokens an answer as were said, on this machine's roofline. Given is
the ratio of seconds without drafts over with, as there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from speculation_speed import prompts

from headrace.base.config import DEFAULT_MODEL
from headrace.engine.described import make_case
from headrace.engine.draft_law import MEASURED, draft_law
from headrace.engine.sim import Cluster
from headrace.engine.sim_replica import ReplicaSpec, SimAnswer, SimRequest
from headrace.loader.open import open_model
from headrace.roofline.hardware import find_hardware
from headrace.roofline.machine import calibration_path
from headrace.text import load_tokenizer

RESULTS = Path(__file__).parent / "results" / "speculation_speed.json"
FRAME = 20
"""Tokens that the model's chat template puts around a question."""
ROUNDS = 8
"""Courses of the chances, of which the median counts."""
PARTS = {"alone": 3, "eight, going on": 3, "eight, one wave, learnt prices": 1}
"""Measured with the prices of today → prompts for each that runs."""


def seconds(spec: ReplicaSpec, asked: list[list[int]], tokens: int, most: int, seed: int) -> float:
    """Virtual seconds until the last of them has ended, `most` at a time."""
    cluster = Cluster(spec, 1, course=seed)
    requests = [SimRequest(str(place), ids, tokens) for place, ids in enumerate(asked)]
    waiting = iter(requests[most:])

    def follow(answer: SimAnswer) -> list[tuple[float, SimRequest]]:
        return [(answer.end, one) for one in [next(waiting, None)] if one is not None]

    answers = cluster.run([(0.0, one) for one in requests[:most]], follow)
    assert len(answers) == len(requests)
    return max(answer.end for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    files = open_model(DEFAULT_MODEL)
    tokenizer = load_tokenizer(files.tokenizer)
    hardware = find_hardware("this", calibration_path())
    case = make_case(DEFAULT_MODEL, hardware)
    spec = ReplicaSpec(case, hardware, rows=32, step_tokens=512, max_context=4096)
    found: list[dict[str, Any]] = []
    measured = json.loads(RESULTS.read_text())
    for part, cell in ((one, cell) for one in PARTS for cell in measured[one]["cells"]):
        name, count = cell["class"], cell["at_once"]
        if name not in MEASURED:
            continue  # A mixture has no law of its own.
        total = PARTS[part] * count
        tokens = round(statistics.mean(one["tokens"] for one in cell["rounds"]) / total)
        ratios = []
        for seed in range(1, ROUNDS + 1):
            turns = prompts(name, total, 1000 * seed + count, tokens)
            texts = ["".join(one["content"] for one in messages) for messages in turns]
            asked = [[7] * FRAME + tokenizer.encode(text) for text in texts]
            without, drafted = (
                seconds(replace(spec, drafts=law), asked, tokens, count, seed)
                for law in (None, draft_law(name))
            )
            ratios.append(without / drafted)
        told = statistics.median(ratios)
        found.append(
            {
                "part": part,
                "class": name,
                "at_once": count,
                "tokens": tokens,
                "simulated": round(told, 3),
                "measured": round(cell["ratio_median"], 3),
                "simulated_over_measured": round(told / cell["ratio_median"], 3),
            }
        )
        print(*found[-1].values(), flush=True)
    off = [abs(one["simulated_over_measured"] - 1) for one in found]
    print(f"median distance {statistics.median(off):.1%}, greatest {max(off):.1%}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
