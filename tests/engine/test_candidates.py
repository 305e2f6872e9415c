"""Features of requests: what is wrong is named, and nothing of it comes to a worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.base.errors import InvalidRequest
from headrace.base.ranking import Feature, Ranker, blank
from headrace.engine.clients.candidates import read_candidates

RANKER = Ranker(
    (Feature("hour", True), Feature("price", False)),
    (
        Feature("user", True, 10, unknown=0),
        Feature("history", True, 20, weighted=True, most=4),
        Feature("item", False, 20),
        Feature("tags", False, 5, "mean", most=3),
    ),
    8,
    (8,),
    1,
    0,
    (),
)
CONTEXT: dict[str, Any] = {"hour": 3, "user": 4, "history": {"ids": [5, 6], "weights": [0.5, 2]}}
CANDIDATES: dict[str, Any] = {"price": [1.5, -2], "item": [7, 8], "tags": [[], [1, 2]]}


def read(most: int = 100, **changed: Any) -> Any:
    """A name with `_` after it is left out."""
    context, candidates = dict(CONTEXT), dict(CANDIDATES)
    for name, value in changed.items():
        of = candidates if name in CANDIDATES else context
        of[name] = value
    return read_candidates(RANKER, context, candidates, most)


def test_the_columns_of_a_request() -> None:
    found = read(user=99)
    assert (found.total, found.ids) == (2, 7)
    numbers = np.frombuffer(found.ranking.numbers, np.float32).reshape(2, 2)
    assert numbers.tolist() == [[3, 1.5], [3, -2]]
    user, history, item, tags = found.ranking.bags
    assert np.frombuffer(user.ids, np.int64).tolist() == [0], "an unseen user is the unknown one"
    assert np.frombuffer(history.ids, np.int64).tolist() == [5, 6]
    assert np.frombuffer(history.weights, np.float32).tolist() == [0.5, 2]
    assert np.frombuffer(item.starts, np.int64).tolist() == [0, 1, 2]
    assert np.frombuffer(tags.starts, np.int64).tolist() == [0, 0, 2]


def test_an_empty_history_is_one() -> None:
    assert read(history=[]).ranking.bags[1].ids == b""
    assert read(history=[1]).ranking.bags[1].weights == np.ones(1, np.float32).tobytes()
    assert blank(RANKER, 3).bags[2].starts == bytes(8 * 4)


@pytest.mark.parametrize(
    ("changed", "param", "match"),
    [
        ({"user": -1}, "context.user", "must be an id from 0 to 9"),
        ({"user": True}, "context.user", "must be an id"),
        ({"user": "4"}, "context.user", "must be an id"),
        ({"user": [1, 2]}, "context.user", "has 2 ids; at most 1"),
        ({"item": [7, 20]}, "candidates.item.1", "which the table lacks; allowed: from 0 to 19"),
        ({"item": [7, 10**30]}, "candidates.item.1", "which the table lacks"),
        ({"item": [7, -(10**30)]}, "candidates.item.1", "must be an id from 0 to 19"),
        ({"item": [7, 1.0]}, "candidates.item.1", "must be an id"),
        ({"item": [7]}, "candidates.item", "has 1 values and price has 2"),
        ({"item": 7}, "candidates.item", "must be a list"),
        ({"tags": [[], {"ids": [1], "weights": [1]}]}, "candidates.tags.1", "must be an id"),
        ({"tags": [[1, 2, 3, 4], []]}, "candidates.tags.0", "has 4 ids; at most 3"),
        ({"hour": float("nan")}, "context.hour", "must be a finite number"),
        ({"hour": 1e39}, "context.hour", "must be a finite number"),
        ({"hour": True}, "context.hour", "must be a finite number"),
        ({"hour": None}, "context.hour", "lacks the feature hour"),
        ({"price": [1, None]}, "candidates.price.1", "must be a finite number"),
        ({"history": {"ids": [1], "weights": []}}, "context.history", "list of 1 numbers"),
        ({"history": {"ids": [1]}}, "context.history", "ids and weights alone"),
        ({"other": 3}, "context.other", "no feature there; allowed: hour, user, history"),
        ({"price": [], "item": [], "tags": []}, "candidates", "0 candidates; allowed: from 1"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], param: str, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match) as raised:
        read(**changed)
    assert raised.value.param == param


def test_bounds() -> None:
    many = {"price": [0] * 101, "item": [1] * 101, "tags": [[]] * 101}
    with pytest.raises(InvalidRequest, match="has 101 candidates; allowed: from 1 to 100"):
        read(**many)
    assert read(101, **many).total == 101
