"""A seeded catalogue of items, its file, and a beam search over it in plain float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

Paths = dict[str, tuple[int, ...]]
CODES = 24
"""Semantic ids of a level."""


def make(file: Path, items: int = 300, levels: int = 3, first: int = 400, seed: int = 5) -> Paths:
    """Write a catalogue whose ids lie from `first`; some prefixes have many items, others one."""
    draws, paths = np.random.default_rng(seed), dict[tuple[int, ...], str]()
    while len(paths) < items:
        codes = np.minimum(draws.geometric(0.12, levels) - 1, CODES - 1)
        path = tuple(first + level * CODES + int(code) for level, code in enumerate(codes))
        paths.setdefault(path, f"item-{len(paths)}")
    found = {name: path for path, name in paths.items()}
    file.write_text("".join(json.dumps({"item": n, "ids": p}) + "\n" for n, p in found.items()))
    return found


def transformers_beams(
    model: torch.nn.Module, prompt: Sequence[int], paths: Paths, beams: int
) -> list[tuple[tuple[int, ...], float]]:
    """The paths that `generate` finds with `num_beams`, legal ones only, and their scores."""
    legal = set(paths.values())
    levels = len(next(iter(legal)))

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        after = tuple(ids[len(prompt) :].tolist())
        return sorted({path[len(after)] for path in legal if path[: len(after)] == after})

    found = model.generate(  # type: ignore[operator]
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=levels,
        min_new_tokens=levels,
        do_sample=False,
        length_penalty=0.0,
        prefix_allowed_tokens_fn=allowed,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        eos_token_id=None,
    )
    ends = [tuple(one[len(prompt) :].tolist()) for one in found.sequences]
    scored = zip(ends, found.sequences_scores.tolist(), strict=True)
    return [(path, score) for path, score in scored if path in legal]


def plain_beams(
    model: torch.nn.Module, prompt: Sequence[int], paths: Paths, beams: int
) -> list[tuple[tuple[int, ...], float]]:
    """The same by hand: every beam's whole prompt anew, all legal continuations sorted."""
    kept: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for depth in range(len(next(iter(paths.values())))):
        ids = torch.tensor([[*prompt, *path] for path, _ in kept])
        with torch.no_grad():
            shares = model(ids).logits[:, -1].double().log_softmax(-1)
        after = [
            (place, (*path, token), score + float(shares[place, token]))
            for place, (path, score) in enumerate(kept)
            for token in sorted({p[depth] for p in paths.values() if p[:depth] == path})
        ]
        after.sort(key=lambda one: (-one[2], one[0], one[1][-1]))
        kept = [(path, score) for _, path, score in after[:beams]]
    return kept
