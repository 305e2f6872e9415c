"""One vector from the hidden states of a whole input, for the rows that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..base.arch import Pooling
from ..base.step import StepPlan
from .rows import Rows

TILE = 64
"""Tokens that are summed at once, counted from the input's start: how a prompt was cut into
chunks does not change the order of its sum."""

Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""hidden [N, D], rows [R] → what is returned in place of vectors [R, labels]."""


class _Mean:
    """The sum of whole tiles [D] and what came after them [under TILE, D]."""

    __slots__ = ("count", "rest", "total")

    def __init__(self, width: int, device: torch.device) -> None:
        self.count = 0
        self.total = torch.zeros(width, device=device)
        self.rest = torch.empty(0, width, device=device)

    def add(self, vectors: torch.Tensor) -> None:
        self.count += len(vectors)
        rest = torch.cat([self.rest, vectors])
        whole = len(rest) // TILE * TILE
        for low in range(0, whole, TILE):
            self.total += rest[low : low + TILE].sum(0)
        self.rest = rest[whole:].clone()

    def mean(self) -> torch.Tensor:
        total = self.total + self.rest.sum(0) if len(self.rest) else self.total
        return total / self.count


class Pooler:
    """Follows the chunks of pooling rows; the last chunk of an input gives its vector."""

    def __init__(self, rows: Rows, pooling: Pooling, head: Head | None = None) -> None:
        self._rows = rows
        self._pooling = pooling
        self._head = head
        self._means: dict[int, _Mean] = {}
        self._firsts: dict[int, torch.Tensor] = {}

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._means.pop(row, None)
            self._firsts.pop(row, None)

    def wanted(self, plan: StepPlan) -> list[int]:
        """The entries whose hidden states, of every token, `collect` will read."""
        if not self._rows.pooling:
            return []
        found: list[int] = np.flatnonzero(self._rows.columns["pooling"][plan.rows]).tolist()
        return found

    def collect(
        self, plan: StepPlan, pooled: Sequence[int], hidden: torch.Tensor
    ) -> list[list[float] | None] | None:
        """Per entry the vector where its input is complete; hidden [N, D]. None: no one asked.

        `pooled` is what `wanted` gave.
        """
        if not pooled:
            return None
        columns = self._rows.columns[plan.rows]
        begins = np.concatenate([[0], np.cumsum(plan.counts)])
        done: list[int] = []
        vectors: list[torch.Tensor] = []
        for entry in pooled:
            begin, end = int(begins[entry]), int(begins[entry + 1])
            row, start = plan.rows[entry], plan.starts[entry]
            complete = start + end - begin == columns[entry]["prompt_length"]
            vector = self._feed(row, start, hidden[begin:end], complete)
            if vector is not None:
                done.append(entry)
                vectors.append(vector)
        result: list[list[float] | None] = [None] * len(plan.rows)
        if not done:
            return result
        together = torch.stack(vectors)
        if self._head is not None:
            together = self._head(together, torch.arange(len(done), device=hidden.device)).float()
        else:
            together = together.float()
            if self._pooling.normalise:
                together = together / together.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        for place, values in zip(done, together.tolist(), strict=True):
            result[place] = values
        return result

    def _feed(
        self, row: int, start: int, chunk: torch.Tensor, complete: bool
    ) -> torch.Tensor | None:
        kind = "cls" if self._head is not None else self._pooling.kind
        if kind == "last":
            return chunk[-1] if complete else None
        if kind == "cls":
            if start == 0:
                self._firsts[row] = chunk[0].clone()
            return self._firsts.pop(row) if complete else None
        if start == 0:
            self._means[row] = _Mean(chunk.shape[1], chunk.device)
        mean = self._means[row]
        mean.add(chunk.float())
        if not complete:
            return None
        del self._means[row]
        return mean.mean()
