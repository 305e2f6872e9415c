"""Features that change logits by a request's sampling parameters.

Logits are numpy arrays or tensors. Each is defined in `kernels.sampling`.
"""

from __future__ import annotations

import numpy as np

from ..base.step import Admission
from ..kernels import host_sampling
from ..kernels.arrays import Array, tensor
from ..kernels.program import LOGITS
from .arrays import like
from .features import Indices, RowWish
from .rows import Rows


class MinTokens(RowWish[tuple[int, tuple[int, ...]]]):
    """Minimum length: ids that end a sequence are forbidden until it has `min_tokens`. Wish of a
    row: the place from which it may end, and the ids that end it."""

    want = LOGITS

    def wish(self, admission: Admission) -> tuple[int, tuple[int, ...]] | None:
        least = admission.spec.sampling.min_tokens
        return (admission.prompt_length + least, admission.spec.stop_ids) if least else None

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        pairs = [
            (index, token)
            for index, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True))
            for until, stops in [self._rows.get(row, (0, ()))]
            if place < until
            for token in stops
        ]
        if not pairs:
            return
        index = like(np.asarray(pairs, np.int64), logits)
        kept = logits[index[:, 0], index[:, 1]]
        logits[index[:, 0], index[:, 1]] = float("-inf")
        # If earlier masks left only ids that end, the sequence ends early.
        empty = (logits[index[:, 0]] == float("-inf")).all(-1)
        logits[index[empty, 0], index[empty, 1]] = kept[empty]


class LogitBias(RowWish[dict[int, float]]):
    """Numbers that a request adds to the logits of some ids."""

    want = LOGITS

    def wish(self, admission: Admission) -> dict[int, float] | None:
        return admission.spec.sampling.logit_bias or None

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        found = [
            (index, token, bias)
            for index, row in enumerate(rows.tolist())
            for token, bias in self._rows.get(row, {}).items()
        ]
        if not found:
            return
        indices, tokens, values = zip(*found, strict=True)
        at = (
            like(np.asarray(indices, np.int64), logits),
            like(np.asarray(tokens, np.int64), logits),
        )
        logits[at] += like(np.asarray(values, np.float32), logits)


_PENALTIES = np.dtype(
    [
        ("prompt_length", np.int64),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
    ]
)


class Penalties(RowWish[tuple[int, float, float, float]]):
    """Repetition, frequency and presence penalties. Counted from the row's tokens each time: no
    state that a preemption could spoil."""

    want = LOGITS

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._table = rows

    def wish(self, admission: Admission) -> tuple[int, float, float, float] | None:
        asked = admission.spec.sampling
        numbers = asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty
        return None if numbers == (1, 0, 0) else (admission.prompt_length, *numbers)

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        some = np.array([i for i, row in enumerate(rows.tolist()) if row in self._rows], np.int64)
        if not len(some):
            return
        chosen = np.array([self._rows[row] for row in rows[some].tolist()], _PENALTIES)
        lengths = places[some]
        width = int(lengths.max())
        # Copies, since a field of a single row counts as contiguous whatever its stride.
        prompts, *rest = (chosen[name].copy() for name in _PENALTIES.names or ())
        columns = [prompts, lengths, *rest]
        if isinstance(logits, np.ndarray):
            table = self._table.host_tokens[rows[some], :width]
            host_sampling.penalise_rows(logits, some, table, *columns)
            return
        from ..kernels import sampling  # Local: it computes on tensors.

        index = like(some, logits)
        tokens = tensor(self._table.tokens)[like(rows[some], logits), :width]
        on_device = [like(each, logits) for each in columns]
        logits[index] = sampling.penalise(logits[index], tokens, *on_device)
