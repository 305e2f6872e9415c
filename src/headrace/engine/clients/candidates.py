"""Features of a request and its candidates, from JSON's values to a ranker's input.

Everything is checked here, where an error can still name the field: the worker looks up ids without
checks. Needs neither torch nor numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...base.errors import InvalidRequest
from ...base.ranking import MOST_IDS, BagColumn, Feature, Ranker, RankingInput

MOST_NUMBER = 3.4e38
"""Numbers are fp32."""
CONTEXT, CANDIDATES = "context", "candidates"


class Candidates(NamedTuple):
    """Candidates that are ready to be ranked."""

    total: int
    ids: int
    """Ids in all bags."""
    ranking: RankingInput


def read_candidates(
    ranker: Ranker, context: Mapping[str, Any], candidates: Mapping[str, Any], most: int
) -> Candidates:
    """Read the features of a request (`context`) and the columns of its candidates. Each column has
    one value per candidate.

    A value is a number, an id, a list of ids, or `{"ids": […], "weights": […]}`. `most`: most
    candidates allowed. Raises `InvalidRequest`, which names the feature.
    """
    _check_names(ranker, context, CONTEXT, shared=True)
    _check_names(ranker, candidates, CANDIDATES, shared=False)
    count = _count(candidates, most)
    numbers = array("f", bytes(4 * count * len(ranker.dense)))
    for at, feature in enumerate(ranker.dense):
        if feature.shared:
            value = _number(context[feature.name], f"{CONTEXT}.{feature.name}")
            numbers[at :: len(ranker.dense)] = array("f", [value]) * count
        else:
            where, given = f"{CANDIDATES}.{feature.name}", candidates[feature.name]
            values = [_number(one, where, place) for place, one in enumerate(given)]
            numbers[at :: len(ranker.dense)] = array("f", values)
    total, bags = 0, list[BagColumn]()
    for feature in ranker.sparse:
        where = f"{CONTEXT if feature.shared else CANDIDATES}.{feature.name}"
        column = _Column(feature, where)
        given = [context[feature.name]] if feature.shared else candidates[feature.name]
        for place, value in enumerate(given):
            column.add(value, None if feature.shared else place)
            if total + len(column.ids) > MOST_IDS:
                raise InvalidRequest(
                    f"the bags have over {MOST_IDS} ids; at most so many are allowed", param=where
                )
        total += len(column.ids)
        bags.append(column.made())
    return Candidates(count, total, RankingInput(numbers.tobytes(), tuple(bags)))


def _check_names(ranker: Ranker, given: Mapping[str, Any], where: str, *, shared: bool) -> None:
    wanted = [name for name, one in ranker.features.items() if one.shared == shared]
    for name in given:
        if name not in wanted:
            raise InvalidRequest(
                f"{where} has {name!r:.80}, which is no feature there; allowed: "
                f"{', '.join(wanted) or 'none'}",
                param=f"{where}.{name:.64}",
                code="unknown_feature",
            )
    for name in wanted:
        if given.get(name) is None:
            raise InvalidRequest(
                f"{where} lacks the feature {name}; an empty bag is []",
                param=f"{where}.{name}",
                code="missing_feature",
            )


def _count(candidates: Mapping[str, Any], most: int) -> int:
    """Return the common length of all columns."""
    first, count = "", 0
    for name, column in candidates.items():
        if not isinstance(column, list):
            raise InvalidRequest(
                f"{CANDIDATES}.{name} must be a list with a value for each candidate",
                param=f"{CANDIDATES}.{name}",
            )
        if not first:
            first, count = name, len(column)
        if len(column) != count:
            raise InvalidRequest(
                f"{CANDIDATES}.{name} has {len(column)} values and {first} has {count}; all must "
                "have one for each candidate",
                param=f"{CANDIDATES}.{name}",
            )
    if not 1 <= count <= most:
        raise InvalidRequest(
            f"candidates has {count} candidates; allowed: from 1 to {most}", param=CANDIDATES
        )
    return count


def _number(value: Any, where: str, place: int | None = None) -> float:
    # NaN fails every comparison.
    if type(value) in (int, float) and -MOST_NUMBER <= value <= MOST_NUMBER:
        return float(value)
    at = where if place is None else f"{where}.{place}"
    raise InvalidRequest(f"{at} is {value!r:.40}; must be a finite number", param=at)


class _Column:
    """The bags of one feature while they are read."""

    def __init__(self, feature: Feature, where: str) -> None:
        self.feature, self.where = feature, where
        self.ids, self.starts, self.weights = array("q"), array("q", [0]), array("f")

    def add(self, value: Any, place: int | None) -> None:
        """Read a bag."""
        at = self.where if place is None else f"{self.where}.{place}"
        weights: Any = None
        if isinstance(value, dict) and self.feature.weighted:
            if value.keys() != {"ids", "weights"}:
                raise InvalidRequest(f"{at} must have ids and weights alone", param=at)
            value, weights = value["ids"], value["weights"]
        ids: Sequence[Any] = value if isinstance(value, list) else [value]
        if len(ids) > self.feature.most:
            raise InvalidRequest(
                f"{at} has {len(ids)} ids; at most {self.feature.most} are allowed", param=at
            )
        self.ids.extend([self._id(one, at) for one in ids])
        self.starts.append(len(self.ids))
        if self.feature.weighted:
            if weights is None:
                weights = [1.0] * len(ids)
            if not isinstance(weights, list) or len(weights) != len(ids):
                raise InvalidRequest(f"{at}.weights must be a list of {len(ids)} numbers", param=at)
            self.weights.extend([_number(one, f"{at}.weights") for one in weights])

    def _id(self, value: Any, at: str) -> int:
        feature = self.feature
        if type(value) is not int or value < 0:
            raise InvalidRequest(
                f"{at} is {value!r:.40}; must be an id from 0 to {feature.rows - 1}, or a list of "
                "ids",
                param=at,
            )
        if value < feature.rows:
            return value
        if feature.unknown is None:
            raise InvalidRequest(
                f"{at} has the id {value!s:.40}, which the table lacks; allowed: from 0 to "
                f"{feature.rows - 1}",
                param=at,
                code="unknown_id",
            )
        return feature.unknown

    def made(self) -> BagColumn:
        return BagColumn(self.ids.tobytes(), self.starts.tobytes(), self.weights.tobytes())
