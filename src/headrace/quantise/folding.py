"""Factors on a product's input channels by which its rounding loses less: AWQ and SmoothQuant.

A matrix W that reads x becomes W · s, and whatever makes x makes x / s: a norm's gain, or the rows
of the up product before a gated activation. AWQ (2306.00978) makes channels that the text uses most
larger in W; SmoothQuant (2211.10438) takes outliers out of x where activations are rounded too. The
factors are chosen by the statistic, without a forward pass. They are powers of two, so the model's
function stays the same bit for bit. Places are read from the step graph, not from names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..base.graph import Graph, NormSpec, WeightRef
from .solve import Floats, loss
from .statistic import Statistic
from .work import WorkFolder

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Exponents of a channel's size in the candidates."""
WIDEST = 8
"""Exponent of two that a factor has at most, either way."""
ROWS = 256
"""Rows of a matrix that candidates are tried on, spread evenly."""


@dataclass(frozen=True, slots=True)
class Fold:
    """One value of the graph that factors can be moved across."""

    readers: tuple[str, ...]
    """Canonical names of all matrices that read it: their columns are multiplied."""
    vectors: tuple[str, ...] = ()
    """Gain and shift of the norm that makes it: they are divided."""
    rows: str | None = None
    """Matrix whose outputs it is proportional to: they are divided."""


class Foldable(Protocol):
    """A tensor that can be tried with factors on its columns."""

    def trial(self, factors: Floats, statistic: Statistic) -> float:
        """Return its error on the text, on `ROWS` rows, if its columns are multiplied first."""
        ...

    def largest(self) -> Floats:
        """Return the largest magnitude of each column, [in]."""
        ...


def folds(graph: Graph) -> Iterator[Fold]:
    """Yield the values of a described graph that only products read, and that a norm with a plain
    gain or a gated activation makes."""
    for node in graph.nodes:
        if len(node.out) != 1 or node.out[0] in graph.outputs.values():
            continue
        readers = [graph.nodes[at] for at in graph.readers(node.out[0])]
        refs = [one.weights[0] for one in readers if one.kind == "linear"]
        if not refs or len(refs) < len(readers) or any(ref.role != "linear" for ref in refs):
            continue
        names = tuple(name for ref in refs for name in ref.names)
        if node.kind == "norm":
            plain = isinstance(node.spec, NormSpec) and not node.spec.offset
            if plain and node.weights:
                vectors = tuple(name for ref in node.weights for name in ref.names)
                yield Fold(names, vectors)
        elif node.kind == "gated":
            both = _linear(graph, node.reads[0])
            if both is not None and len(both.names) == 2:
                yield Fold(names, rows=both.names[1])


def _linear(graph: Graph, value: object) -> WeightRef | None:
    """Return the matrix of the product without a bias that makes a value; None: something else."""
    at = graph.maker(value)  # type: ignore[arg-type]
    node = graph.nodes[at] if at >= 0 else None
    if node is None or node.kind != "linear" or len(node.weights) != 1:
        return None
    return node.weights[0]


def factors_of(statistic: Statistic, tensors: Sequence[Foldable]) -> Floats:
    """Return the factors [in], powers of two, with which the tensors that read one input lose least
    on the text in all; ones if none helps."""
    none = np.ones(len(statistic.gram), np.float32)
    size = np.sqrt(np.diagonal(statistic.gram))
    weights = np.max([one.largest() for one in tensors], axis=0)
    best, found = sum(one.trial(none, statistic) for one in tensors), none
    for candidate in _candidates(size, statistic.top, weights):
        error = sum(one.trial(candidate, statistic) for one in tensors)
        if error < best:
            best, found = error, candidate
    return found


def _candidates(size: Floats, top: Floats, weights: Floats) -> Iterator[Floats]:
    logs = [np.log2(np.maximum(one, 1e-30)) for one in (size, top, weights)]
    used = (size > 0) & (top > 0) & (weights > 0)
    for share in SHARES:
        yield _powers(share * logs[0], used)
        if share < 1:
            yield _powers(share * logs[1] - (1 - share) * logs[2], used)


def _powers(exponents: npt.NDArray[Any], used: npt.NDArray[np.bool_]) -> Floats:
    """Return powers of two whose middle is 1; 1 for channels that are not used."""
    middle = np.median(exponents[used]) if used.any() else 0.0
    whole = np.clip(np.rint(exponents - middle), -WIDEST, WIDEST)
    return np.ldexp(np.float32(1), np.where(used, whole, 0).astype(np.int32)).astype(np.float32)


def divided(statistic: Statistic, factors: Floats) -> Statistic:
    """Return the statistic of x / factors."""
    gram = statistic.gram / factors / factors[:, None]
    return Statistic(statistic.count, gram, statistic.top / factors, statistic.some / factors)


def activation_error(w: Floats, statistic: Statistic) -> float:
    """Return the squared error on the text of products with w [rows, in] whose inputs are rounded
    to eight bits by token, relative to each token's outputs: a token of huge activations, such as
    a text's first, counts as one token."""
    x = statistic.some
    step = np.abs(x).max(1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    off = np.square((np.rint(x * inverse) * step - x) @ w.T).sum(1, dtype=np.float64)
    power = np.square(x @ w.T).sum(1, dtype=np.float64)
    share = np.divide(off, power, out=np.zeros_like(off), where=power > 0)
    return float(share.sum()) / max(1, len(x)) * loss(w, statistic.gram)


@dataclass(slots=True)
class Factors:
    """Factors of one tensor; None: it has none."""

    columns: Floats | None = None
    """[in]: its columns are multiplied by them."""
    rows: Floats | None = None
    """[out]: its rows are divided by them."""
    seen: Statistic | None = None
    """Statistic of the input that its columns then have."""

    def of(self, w: Floats) -> Floats:
        """Return w [out, in] with the factors."""
        if self.columns is not None:
            w = w * self.columns
        return w if self.rows is None else w / self.rows[:, None]


def vector_factors(places: Sequence[Fold], folder: WorkFolder) -> dict[str, Floats]:
    """Return the factors by which the vectors of norms are divided, by canonical name."""
    found: dict[str, Floats] = {}
    for number, place in enumerate(places):
        if place.vectors and folder.has(f"factors{number}"):
            factors = folder.array(f"factors{number}", np.float32)
            found |= dict.fromkeys(place.vectors, factors)
    return found
