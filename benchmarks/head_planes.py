"""How many rows of the head stay candidates when only the high bits of their codes are read?

Run: `python benchmarks/head_planes.py [--json FILE]`. Of the default model's own hidden states at
greedy tokens: the high bits give every logit up to a bound that is proven, and a row whose upper
bound reaches the best lower one has to be read whole (ADR 0077). Takes a few seconds and 3 GiB.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace import LLM, SamplingParams
from headrace.kernels.weights import BlockWeight, PackedWeight
from headrace.loader.weights import load_weights
from headrace.quant.rows import unpack

TOKENS = 48
PROMPTS = [
    "def fibonacci(n):", "The capital of France is", "Write a haiku about rivers.\n",
    "import numpy as np\n\nclass Matrix:\n", "1, 1, 2, 3, 5,", "Dear Sir or Madam,",
]  # fmt: skip


def hidden_states(llm: LLM) -> torch.Tensor:
    """What the head gets [N, D] while the prompts are answered."""
    program = llm._engine.core.executor._worker._runner._greedy  # type: ignore[attr-defined]
    greedy, seen = program.greedy, []

    def watched(batch: Any) -> Any:
        found = greedy(batch)
        seen.append(np.array(found[0]))
        return found

    program.greedy = watched
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    return torch.from_numpy(np.concatenate(seen))


def shares(hidden: torch.Tensor, head: PackedWeight, low: int) -> dict[str, list[float]]:
    """Bound → share of the rows that stay candidates, over tokens: median, least, most."""
    (rows, width), half = head.shape, ((1 << low) - 1) / 2
    kept = (head.codes & (0xFF ^ ((1 << low) - 1))).float() + half
    rest = head.codes.float() - kept
    scales = head.scales.repeat_interleave(head.group, 1)
    offsets = 0.0 if head.offsets is None else head.offsets.repeat_interleave(head.group, 1)
    logits = hidden @ (kept * scales + offsets).T
    groups = hidden.view(len(hidden), width // head.group, head.group)
    norms = rest.view(rows, -1, head.group).norm(dim=-1) * head.scales.abs()
    bounds = {
        "sum of magnitudes": half * (groups.abs().sum(-1) @ head.scales.abs().T),
        "norms of groups": groups.norm(dim=-1) @ norms.T,
    }
    error = (hidden @ (rest * scales).T).abs()
    found: dict[str, list[float]] = {}
    for name, bound in bounds.items():
        assert bool((error <= bound * (1 + 1e-4) + 1e-4).all()), "the bound does not hold"
        best = (logits - bound).amax(-1, keepdim=True)
        share = (logits + bound >= best).float().mean(-1)
        found[name] = [float(share.median()), float(share.min()), float(share.max())]
        found[f"{name}, over the mean error"] = [float(bound.mean() / error.mean())]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with LLM(max_context=1024) as llm:
        hidden, weights = hidden_states(llm), dict(load_weights(llm.files))
        weight = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        assert isinstance(weight, BlockWeight)
        head = unpack(weight)
    document = {
        "head": [weight.kind, *head.shape], "tokens": len(hidden),
        "low_bits": {low: shares(hidden, head, low) for low in (1, 2, 3, 4)},
    }  # fmt: skip
    print(json.dumps(document, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
