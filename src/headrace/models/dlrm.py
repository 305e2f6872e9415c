"""DLRM-DCNv2: embedding bags, low-rank crosses and dense layers, for scores of candidates.

Naumov et al. 2019 (arXiv 1906.00091) with the crosses of Wang et al. 2020 (arXiv 2008.13535) in
place of dot products. The folder's format is our own, described in `docs/embeddings.md`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..base.arch import ModelArch, Rope
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError
from ..base.graph import ActivationSpec, Graph, Purpose, Value
from ..base.ranking import MOST_CANDIDATES, MOST_IDS, Bag, BagsSpec, Feature, Ranker
from ..layers.description import Description, matrix
from .family import Config, Family, integer

MOST_FEATURES, MOST_LAYERS, MOST_WIDTH = 256, 32, 2**16
MOST_ROWS = 2**31 - 1
RELU, PRODUCT = ActivationSpec("relu"), ActivationSpec("identity")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def dlrm(arch: ModelArch) -> Graph:
    """Describe one score per candidate: x₀ = concat(bottom(dense), bags), then crosses x ← x₀ · (V
    U x + b) + x, then top layers."""
    ranker = arch.ranker
    assert ranker is not None, "the architecture says nothing of a ranker"
    to = Description(arch)
    x = to.node("embed", (), len(ranker.dense), spec=BagsSpec(numbers=len(ranker.dense)))
    x = _layers(to, x, "bottom", ranker.bottom, "up")
    bags = [Bag(at, one.pool, one.most) for at, one in enumerate(ranker.sparse)]
    tables = [
        matrix([f"bags.{one.name}"], [one.rows], ranker.width, "bag", purpose="embed")
        for one in ranker.sparse
    ]
    x = first = to.node("embed", (x,), ranker.joined, tables, BagsSpec(tuple(bags)))
    for layer in range(ranker.crosses):
        at, inner = f"cross.layers.{layer}", x
        if ranker.rank:
            inner = to.linear(x, f"{at}.down", outputs=ranker.rank, purpose="gate_up")
        grown = to.linear(inner, f"{at}.up", outputs=ranker.joined, bias=True, purpose="gate_up")
        # The product comes first: the sum overwrites it, and x₀ is read again.
        x = to.add(to.node("multiply", (first, grown), ranker.joined, spec=PRODUCT), x)
    x = _layers(to, x, "top", ranker.top, "down")
    return to.graph(hidden=to.linear(x, "score", outputs=1, bias=True, purpose="head"))


def _layers(
    to: Description, x: Value, name: str, outputs: Sequence[int], purpose: Purpose
) -> Value:
    for layer, width in enumerate(outputs):
        made = to.linear(x, f"{name}.layers.{layer}", outputs=width, bias=True, purpose=purpose)
        x = to.activate(made, RELU)
    return x


def _ranker(config: Config) -> Ranker:
    """Read the shape of a ranker. Raises `ModelFileError` and `UnsupportedModel`."""
    fields = config.fields
    dense = [_feature(one, Feature) for one in _objects(fields, "dense_features")]
    sparse = [_feature(one, _bag) for one in _objects(fields, "sparse_features")]
    names = [one.name for one in (*dense, *sparse)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ModelFileError(
            f"config.json: two features have the name {twice[0]}", param="sparse_features"
        )
    if all(one.shared for one in (*dense, *sparse)):
        raise ModelFileError(
            "config.json: no feature is of a candidate, so all would have one score",
            param="sparse_features",
        )
    width = fields.integer("embedding_size", 1, 2**12)
    bottom = _widths(fields, "bottom_layers")
    if not bottom or bottom[-1] != width:
        raise ModelFileError(
            f"config.json: the last of bottom_layers must be embedding_size ({width})",
            param="bottom_layers",
        )
    crosses = fields.integer("cross_layers", 0, MOST_LAYERS)
    rank = fields.integer("cross_rank", 0, MOST_WIDTH)
    top = _widths(fields, "top_layers")
    return Ranker(tuple(dense), tuple(sparse), width, bottom, crosses, rank, top)


def _objects(fields: Fields, key: str) -> list[Fields]:
    given = fields.raw(key)
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_FEATURES:
        raise ModelFileError(
            f"config.json: {key} must be a list of 1 to {MOST_FEATURES} features", param=key
        )
    if not all(isinstance(one, dict) for one in given):
        raise ModelFileError(f"config.json: {key} must be a list of objects", param=key)
    return [Fields(one, f"config.json: {key}.{place}") for place, one in enumerate(given)]


def _feature(fields: Fields, make: Any) -> Feature:
    name = fields.raw("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ModelFileError(
            f"{fields.where}: name is {name!r:.80}; must be lower-case letters, digits and _, at "
            "most 64",
            param="name",
        )
    shared = fields.word("of", ("request", "candidate")) == "request"
    made: Feature = make(name, shared) if make is Feature else make(fields, name, shared)
    return made


def _bag(fields: Fields, name: str, shared: bool) -> Feature:
    rows = fields.integer("rows", 1, MOST_ROWS)
    pool: Any = fields.word("pool", ("sum", "mean"), "sum")
    weighted = fields.flag("weighted", False)
    if weighted and pool == "mean":
        raise ModelFileError(f"{fields.where}: a mean has no weights", param="weighted")
    most = fields.integer("most", 1, MOST_IDS, 1)
    unknown = None
    if fields.raw("unknown") is not None:
        unknown = fields.integer("unknown", 0, rows - 1)
    return Feature(name, shared, rows, pool, weighted, most, unknown)


def _widths(fields: Fields, key: str) -> tuple[int, ...]:
    given = fields.raw(key)
    right = isinstance(given, list) and all(
        type(one) is int and 1 <= one <= MOST_WIDTH for one in given
    )
    if not right or len(given) > MOST_LAYERS:
        raise ModelFileError(
            f"config.json: {key} must be a list of at most {MOST_LAYERS} widths from 1 to "
            f"{MOST_WIDTH}",
            param=key,
        )
    return tuple(given)


def _joined(config: Config) -> int:
    return int(config["beyond.ranker"].joined)


def _widest(config: Config) -> int:
    ranker = config["beyond.ranker"]
    return int(max(ranker.top + ranker.bottom))


FAMILIES = (
    Family(
        "dlrm_dcnv2", dlrm, {"dlrm_dcnv2": ("DlrmDcnV2ForRanking",)},
        fields={
            "beyond.ranker": _ranker, "vocab_size": 1, "hidden": _joined,
            "layers": lambda config: max(1, config["beyond.ranker"].crosses),
            "heads": 1, "kv_heads": 1, "head_dim": 1,
            "intermediate": _widest,
            "max_context": integer("max_candidates", "", 8, MOST_CANDIDATES, 2048),
            "norm_eps": 1e-5, "activation": "silu", "rope": Rope(), "windows": (),
            "qkv_bias": False, "output_bias": False, "tied_embedding": False,
        },
    ),
)  # fmt: skip
