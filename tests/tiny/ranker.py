"""A small ranker of random weights, with a feature of every kind, and requests for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiny.dlrm import Dlrm, batch, write

CONFIG: dict[str, Any] = {
    "dense_features": [
        {"name": "hour", "of": "request"},
        {"name": "price", "of": "candidate"},
        {"name": "age", "of": "candidate"},
    ],
    "sparse_features": [
        {"name": "user", "of": "request", "rows": 50, "unknown": 0},
        {"name": "history", "of": "request", "rows": 90, "weighted": True, "most": 40},
        {"name": "seen", "of": "request", "rows": 90, "pool": "mean", "most": 40},
        {"name": "item", "of": "candidate", "rows": 90, "unknown": 1},
        {"name": "tags", "of": "candidate", "rows": 7, "most": 5},
    ],
    "embedding_size": 16,
    "bottom_layers": [48, 16],
    "cross_layers": 3,
    "cross_rank": 32,
    "top_layers": [64, 32],
}


def make(folder: Path, *, rows: str = "float32", seed: int = 3, **config: Any) -> Dlrm:
    """Write a folder; return the torch model of the same numbers."""
    torch.manual_seed(seed)
    model = Dlrm({**CONFIG, **config}).eval()
    for table in model.bags.values():
        torch.nn.init.normal_(table.weight)
    write(model, folder, rows)
    return model


def requested(draws: np.random.Generator, candidates: int) -> dict[str, Any]:
    """A request with bags of many lengths, none among them."""

    def ids(rows: int, most: int) -> list[int]:
        return draws.integers(0, rows, int(draws.integers(0, most + 1))).tolist()

    history = ids(90, 40)
    return {
        "context": {
            "hour": float(draws.normal()),
            "user": int(draws.integers(50)),
            "history": {"ids": history, "weights": draws.normal(size=len(history)).tolist()},
            "seen": ids(90, 40),
        },
        "candidates": {
            "price": draws.normal(size=candidates).tolist(),
            "age": draws.normal(size=candidates).tolist(),
            "item": draws.integers(0, 90, candidates).tolist(),
            "tags": [ids(7, 5) for _ in range(candidates)],
        },
    }


@torch.no_grad()
def scored(model: Dlrm, body: dict[str, Any]) -> list[float]:
    """The logits of torch."""
    context = dict(body["context"])
    context["user"] = [context["user"]]
    context["history"] = (context["history"]["ids"], context["history"]["weights"])
    own = body["candidates"]
    examples = [
        {**context, **{name: column[at] for name, column in own.items()}, "item": [own["item"][at]]}
        for at in range(len(own["item"]))
    ]
    return model(*batch(model.config, examples)).tolist()
