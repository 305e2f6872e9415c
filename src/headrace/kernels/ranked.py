"""Numeric inputs of a step: features of candidates, with the specification of bags, and pictures.

The CPU kernels compute the same bits (`cpu/csrc/bags.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..base.ranking import BagsSpec
from .arrays import Array, floats, tensor
from .weights import DenseWeight, PackedWeight, Weight

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BagRows:
    """Bags of one feature in a step, on the host."""

    ids: Ids
    starts: Ids
    """[bags + 1]: bag i has the ids starts[i] : starts[i + 1]."""
    weights: npt.NDArray[np.float32] | None
    """Factor of each id; None: all are 1."""
    of: Ids | None
    """[N], ascending: bag of each row; None: row n has bag n."""


@dataclass(frozen=True, slots=True)
class RankedRows:
    """Features of the rows of a step, on the host."""

    numbers: npt.NDArray[np.float32]
    """[N, dense features]."""
    bags: tuple[BagRows, ...]
    """By sparse feature."""


@dataclass(frozen=True, slots=True)
class PicturedRows:
    """Inputs of a step's pictures, on the host. A picture is an entry with one sampled row."""

    patches: npt.NDArray[np.float32]
    """[N, numbers of a patch]."""
    times: npt.NDArray[np.float32]
    """[R, features]: features of each entry's time step."""
    labels: Ids
    """[R]: class of each entry."""
    texts: npt.NDArray[np.float32]
    """[T, ·]: rows of each entry's encoded text."""
    text_starts: npt.NDArray[np.int32]
    """[B + 1]: bounds of the entries in `texts`."""


def bags(
    x: Array | None, ranked: RankedRows, spec: BagsSpec, tables: Sequence[Weight], *, host: bool
) -> Array:
    """Return fp32 columns: x [N, ·], the numbers, and a bag of each table. `host`: arrays are
    numpy's; otherwise tensors."""
    columns: list[npt.NDArray[np.float32]] = [] if x is None else [floats(x)]
    if spec.numbers:
        columns.append(ranked.numbers)
    for bag, table in zip(spec.bags, tables, strict=True):
        given = ranked.bags[bag.feature]
        sums = _sums(given, table)
        if bag.pool == "mean":
            sums /= np.maximum(np.diff(given.starts), 1)[:, None].astype(np.float32)
        columns.append(sums if given.of is None else sums[given.of])
    made = np.concatenate(columns, 1)
    return made if host else tensor(made).to(x.dtype if x is not None else tensor(made).dtype)


def _sums(given: BagRows, table: Weight) -> npt.NDArray[np.float32]:
    """Return the sum of each bag [bags, width], added in the order of its ids."""
    counts = np.diff(given.starts)
    sums = np.zeros((len(counts), table.shape[1]), np.float32)
    for place in range(int(counts.max(initial=0))):
        (having,) = (counts > place).nonzero()
        at = given.starts[having] + place
        rows = rows_of(table, given.ids[at])
        if given.weights is not None:
            rows = rows * given.weights[at, None]
        sums[having] += rows
    return sums


def rows_of(table: Weight, ids: Ids) -> npt.NDArray[np.float32]:
    """Return rows of a table in fp32, on the host."""
    if isinstance(table, PackedWeight):
        codes = table.codes[ids].astype(np.int32) - 128
        made: npt.NDArray[np.float32] = codes.astype(np.float32) * table.scales[ids]
        return made
    assert isinstance(table, DenseWeight), "tables of bags are dense, or codes of eight bits"
    return floats(table.data[ids])


def keeps_codes(table: Weight) -> bool:
    """Return whether a table's rows are 8-bit codes around 128, with a scale each."""
    return (
        isinstance(table, PackedWeight)
        and table.bits == 8
        and table.group == table.shape[1]
        and table.order is None
        and table.offsets is not None
        and bool((table.offsets == -128 * table.scales).all())
    )
