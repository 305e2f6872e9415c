"""A ranker trained on MovieLens-100k, served, and asked by a client: torch's scores and its AUC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from processes import serving

from tiny import dlrm as ranker

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """The model, and the sessions that it has not seen, most of them of new users."""
    model, rest = ranker.train(tmp_path_factory.mktemp("wheel"))
    return model, rest


def answers(folder: Path, flags: str, sessions: list[Any]) -> list[float]:
    """The scores of every candidate, by HTTP."""
    with serving(folder, flags) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def scores(session: Any) -> list[float]:
            ids, weights = session.context["history"]
            context = {**session.context, "history": {"ids": ids, "weights": weights}}
            reply = client.post(
                "/v1/recommend", json={"context": context, "candidates": session.candidates}
            )
            assert reply.status_code == 200, reply.text
            found: list[float] = reply.json()["scores"]
            return found

        with ThreadPoolExecutor(4) as pool:
            return [score for some in pool.map(scores, sessions) for score in some]


def test_the_scores_and_the_auc_are_those_of_torch(trained: Any, tmp_path: Path) -> None:
    model, rest = trained
    ranker.write(model, tmp_path / "exact")
    labels = [label for session in rest for label in session.labels]
    wanted = 1 / (1 + np.exp(-np.array(ranker.evaluate(model, rest))))
    area = ranker.auc(labels, wanted.tolist())
    assert area > 0.68, "it has learnt nothing"
    exact = answers(tmp_path / "exact", "--quantise none", rest)
    assert np.abs(np.array(exact) - wanted).max() <= 1e-5
    assert abs(ranker.auc(labels, exact) - area) <= 1e-4
    narrow = answers(tmp_path / "exact", "", rest)
    assert narrow != exact
    assert abs(ranker.auc(labels, narrow) - area) <= 1e-3
    # Rows of eight bits: the reference then has the same rows.
    ranker.write(model, tmp_path / "int8", "int8")
    wanted = 1 / (1 + np.exp(-np.array(ranker.evaluate(model, rest))))
    codes = answers(tmp_path / "int8", "--quantise none", rest)
    assert np.abs(np.array(codes) - wanted).max() <= 1e-5
