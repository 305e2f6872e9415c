"""Ranking as all parts see it: features of a request and its candidates, and bags of table rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

Pool = Literal["sum", "mean"]
MOST_CANDIDATES = 16_384
MOST_IDS = 1 << 20
"""Maximum ids in all bags of one request."""


class Feature(NamedTuple):
    """A named input of a ranker: a number, or a bag of ids of a table's rows."""

    name: str
    shared: bool
    """Whether a request has one value for all candidates; else each candidate has its own."""
    rows: int = 0
    """Rows of its table; 0: it is a number."""
    pool: Pool = "sum"
    weighted: bool = False
    """Whether each id comes with a factor."""
    most: int = 1
    """Maximum ids in a bag; prices assume this number."""
    unknown: int | None = None
    """Row that stands for ids beyond the table; None: they are refused."""


class Ranker(NamedTuple):
    """DLRM with a deep and cross network (Naumov et al. 2019; Wang et al. 2020)."""

    dense: tuple[Feature, ...]
    sparse: tuple[Feature, ...]
    width: int
    """Numbers of a table's row, and outputs of the bottom layers."""
    bottom: tuple[int, ...]
    """Outputs of the layers that read dense features; the last is `width`."""
    crosses: int
    rank: int
    """Numbers between the two matrices of a cross layer; 0: it has one matrix."""
    top: tuple[int, ...]
    """Outputs of the layers after the crosses, before the score."""

    @property
    def joined(self) -> int:
        """Columns of the bottom's output and all bags side by side."""
        return self.width * (len(self.sparse) + 1)

    @property
    def features(self) -> Mapping[str, Feature]:
        return {one.name: one for one in (*self.dense, *self.sparse)}


class Bag(NamedTuple):
    """The columns of a node that are sums over rows of a table."""

    feature: int
    """Number of the feature among the sparse ones."""
    pool: Pool = "sum"
    most: int = 1


class BagsSpec(NamedTuple):
    """Columns of x, then `numbers` dense features of each row, then a bag of each table.

    Ids of a bag are summed from zero in their order, each times its weight.
    """

    bags: tuple[Bag, ...] = ()
    numbers: int = 0


class BagColumn(NamedTuple):
    """The bags of one sparse feature of a request: one if it is shared, else one a candidate."""

    ids: bytes
    """int64 of this machine's byte order."""
    starts: bytes
    """int64 [bags + 1]: bag i has the ids from starts[i] to before starts[i + 1]."""
    weights: bytes = b""
    """fp32, one an id; empty: all are 1."""


class RankingInput(NamedTuple):
    """The features of a request, verified: every id is a row of its table."""

    numbers: bytes
    """fp32 [candidates, dense features]."""
    bags: tuple[BagColumn, ...]
    """By sparse feature."""

    @property
    def size(self) -> int:
        """Bytes of all features."""
        return len(self.numbers) + sum(len(part) for one in self.bags for part in one)


def blank(ranker: Ranker, candidates: int) -> RankingInput:
    """Return an input of zeros and empty bags."""
    columns = (
        BagColumn(b"", bytes(8 * ((1 if one.shared else candidates) + 1))) for one in ranker.sparse
    )
    return RankingInput(bytes(4 * candidates * len(ranker.dense)), tuple(columns))
