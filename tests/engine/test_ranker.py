"""DLRM-DCNv2 through the one loop, scheduler and worker: torch's scores, whatever else runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from headrace.base.config import EngineOptions
from headrace.base.errors import ModelFileError, OptionError, UnsupportedModel
from headrace.base.modelfiles import ModelFiles
from headrace.base.outputs import Scores
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.engine.clients.candidates import read_candidates
from headrace.engine.loop.build import Built, build
from headrace.loader.open import open_model
from tiny import ranker

EXACT: dict[str, Any] = {"device": "cpu", "threads": 2, "quantise": "none"}
SIZES = (1, 30, 7, 600, 2)
ROUNDED = {"float32": 1e-5, "float16": 1e-5, "int8": 1e-5}
"""Between scores of the same table rows: only the sums of dense layers differ."""


class Engine(NamedTuple):
    built: Built
    files: ModelFiles

    def ranked(self, bodies: list[dict[str, Any]]) -> list[list[float]]:
        """The logits of each request; all run at once."""
        core, found, shape = self.built.core, dict[str, list[float]](), self.files.arch.ranker
        assert shape is not None
        for place, body in enumerate(bodies):
            read = read_candidates(shape, body["context"], body["candidates"], 2048)
            spec = RequestSpec(SamplingParams(), seed=1, task="rank", ranking=read.ranking)
            core.add(Request(id=str(place), prompt=[0] * read.total, spec=spec))
        while core.has_work:
            for delta in core.turn():
                assert isinstance(delta.output, Scores), delta.error
                found[delta.request_id] = delta.output.values
        return [found[str(place)] for place in range(len(bodies))]


def opened(folder: Path, **options: Any) -> Engine:
    files = open_model(str(folder))
    return Engine(build(EngineOptions(model=str(folder), **{**EXACT, **options}), files), files)


def bodies(seed: int = 0) -> list[dict[str, Any]]:
    draws = np.random.default_rng(seed)
    return [ranker.requested(draws, size) for size in SIZES]


def sigmoid(values: list[float]) -> np.ndarray:
    return 1 / (1 + np.exp(-np.array(values)))


@pytest.mark.parametrize("rows", ROUNDED)
def test_scores_are_those_of_torch(tmp_path: Path, rows: str) -> None:
    model = ranker.make(tmp_path, rows=rows)
    engine = opened(tmp_path)
    asked = bodies()
    for body, found in zip(asked, engine.ranked(asked), strict=True):
        wanted = sigmoid(ranker.scored(model, body))
        assert np.abs(sigmoid(found) - wanted).max() <= ROUNDED[rows]
    engine.built.close()


def test_a_score_is_the_same_alone_in_chunks_and_beside_others(tmp_path: Path) -> None:
    ranker.make(tmp_path, cross_rank=0)
    asked = bodies(1)
    wanted = None
    for options in ({}, {"step_tokens": 16}, {"quantise": "auto"}, {"threads": 1}):
        engine = opened(tmp_path, **options)
        together = engine.ranked(asked)
        assert together == [engine.ranked([one])[0] for one in asked]
        if "quantise" not in options:
            wanted = wanted or together
            assert together == wanted
        engine.built.close()


def test_the_interpreter_agrees(tmp_path: Path) -> None:
    model = ranker.make(tmp_path, rows="int8")
    engine = opened(tmp_path, kernels="ref")
    asked = bodies(2)
    for body, found in zip(asked, engine.ranked(asked), strict=True):
        assert np.abs(sigmoid(found) - sigmoid(ranker.scored(model, body))).max() <= 1e-5
    engine.built.close()


def test_products_in_int8_by_default(tmp_path: Path) -> None:
    model = ranker.make(tmp_path)
    engine = opened(tmp_path, quantise="auto")
    decided = {one.name: one for one in engine.built.decisions}
    assert decided["quantise"].value == "int8"
    assert decided["kernels.embed"].value == "cpu"
    (found,) = engine.ranked(bodies()[3:4])
    error = np.abs(sigmoid(found) - sigmoid(ranker.scored(model, bodies()[3])))
    assert 0 < error.max() < 0.05
    engine.built.close()


def test_a_config_that_lies_is_refused(tmp_path: Path) -> None:
    def wrong(match: str, error: type[Exception] = ModelFileError, **config: Any) -> None:
        whole = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**whole, **config}))
        with pytest.raises(error, match=match):
            opened(tmp_path).built.close()
        (tmp_path / "config.json").write_text(json.dumps(whole))

    ranker.make(tmp_path)
    sparse = ranker.CONFIG["sparse_features"]
    wrong("must be a list of 1 to", sparse_features=[])
    wrong("two features have the name user", sparse_features=[sparse[0], sparse[0]])
    wrong("must be lower-case letters", sparse_features=[{**sparse[0], "name": "../x"}])
    wrong("rows is 0", UnsupportedModel, sparse_features=[{**sparse[0], "rows": 0}])
    wrong("a mean has no weights", sparse_features=[{**sparse[2], "weighted": True}])
    wrong("unknown is 50", UnsupportedModel, sparse_features=[{**sparse[0], "unknown": 50}])
    wrong("no feature is of a candidate", sparse_features=sparse[:1], dense_features=[
        {"name": "hour", "of": "request"}
    ])  # fmt: skip
    wrong("last of bottom_layers", bottom_layers=[48, 17])
    wrong("bags.user.weight", sparse_features=[{**sparse[0], "rows": 51}, *sparse[1:]])
    wrong("list of at most", top_layers=[0])


def test_where_it_is_not_served(tmp_path: Path) -> None:
    ranker.make(tmp_path)
    with pytest.raises(OptionError, match="layout must be 1"):
        opened(tmp_path, layout="tp2")
