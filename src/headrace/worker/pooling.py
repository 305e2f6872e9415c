"""One vector from the hidden states of a whole input, for the rows that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..base.arch import Pooling
from ..base.outputs import Scores, Vector
from ..base.step import Admission, StepPlan, StepResult
from ..kernels.arrays import Array
from ..kernels.program import EVERY, Outputs
from .arrays import concatenate, copy, fp32, normalised, stack
from .features import RowWish

TILE = 64
"""Tokens summed at once, counted from the input's start: so the cut of a prompt into chunks does
not change the order of its sum."""

Head = Callable[[Array], Array]
"""Function from hidden states [R, D] to the output [R, labels] in place of vectors."""


class _Mean:
    """Sum of whole tiles [D], and the vectors after them [under TILE, D]."""

    __slots__ = ("count", "rest", "total")

    def __init__(self, vectors: Array) -> None:
        """Start with `vectors` [N, D] fp32; more can be added."""
        self.count = 0
        self.total: Array = 0.0
        self.rest: Array = vectors[:0]
        self.add(vectors)

    def add(self, vectors: Array) -> None:
        self.count += len(vectors)
        rest = concatenate([self.rest, vectors])
        whole = len(rest) // TILE * TILE
        for low in range(0, whole, TILE):
            self.total = self.total + rest[low : low + TILE].sum(0)
        self.rest = copy(rest[whole:])

    def mean(self) -> Array:
        total = self.total + self.rest.sum(0) if len(self.rest) else self.total
        return total / self.count


class Pooler(RowWish[int]):
    """Pooling over the chunks of rows that want a vector; an input's last chunk completes it. Wish
    of a row: the length of its input."""

    want = EVERY

    def __init__(self, pooling: Pooling, head: Head | None = None) -> None:
        super().__init__()
        self._pooling = pooling
        self._head = head
        self._means: dict[int, _Mean] = {}
        self._firsts: dict[int, Array] = {}

    def wish(self, admission: Admission) -> int | None:
        pools = admission.spec.task in ("vector", "score")
        return admission.prompt_length if pools else None

    def release(self, rows: Sequence[int]) -> None:
        super().release(rows)
        for row in rows:
            self._means.pop(row, None)
            self._firsts.pop(row, None)

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        """Write the vectors or scores of complete inputs into the result; hidden [N, D]."""
        assert outputs.hidden is not None
        begins = np.concatenate([[0], np.cumsum(plan.counts)]).tolist()
        done: list[int] = []
        vectors: list[Array] = []
        for entry, row in enumerate(plan.rows):
            if row not in self._rows:
                continue
            begin, end, start = begins[entry], begins[entry + 1], plan.starts[entry]
            complete = start + end - begin == self._rows[row]
            vector = self._feed(row, start, outputs.hidden[begin:end], complete)
            if vector is not None:
                done.append(entry)
                vectors.append(vector)
        if not done:
            return
        kind: type[Vector | Scores] = Vector if self._head is None else Scores
        together = stack(vectors)
        if self._head is not None:
            together = fp32(self._head(together))
        else:
            together = fp32(together)
            if self._pooling.normalise:
                together = normalised(together)
        found = {entry: kind(values) for entry, values in zip(done, together.tolist(), strict=True)}
        result.outputs = {**(result.outputs or {}), **found}

    def _feed(self, row: int, start: int, chunk: Array, complete: bool) -> Array | None:
        kind = "cls" if self._head is not None else self._pooling.kind
        if kind == "last":
            return chunk[-1] if complete else None
        if kind == "cls":
            if start == 0:
                self._firsts[row] = copy(chunk[0])
            return self._firsts.pop(row) if complete else None
        if start == 0:
            mean = self._means[row] = _Mean(fp32(chunk))
        else:
            mean = self._means[row]
            mean.add(fp32(chunk))
        if not complete:
            return None
        del self._means[row]
        return mean.mean()
