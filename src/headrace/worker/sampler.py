"""From a step's logits to its tokens: each row by its own parameters, all rows at once.

Work is done only for what some row asks: a step of greedy rows is one argmax. The order of the
filters and the definition of each are in `kernels.sampling`. Logits are numpy arrays or tensors,
and tokens are what the logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..base.step import TokenLogprobs
from ..kernels import host_sampling
from ..kernels.arrays import Array, tensor
from ..kernels.draws import Drawing, DrawParameters, by_rules
from .arrays import like

if TYPE_CHECKING:
    from .rows import Rows


class LogitMask(Protocol):
    """Forbids tokens before anything else is done (a grammar)."""

    def apply(self, logits: Array, rows: npt.NDArray[np.int64]) -> None:
        """Set forbidden logits [R, V] of these rows to -inf, in place."""
        ...


class Sampler:
    def __init__(self, rows: Rows, masks: Sequence[LogitMask], drawing: Drawing) -> None:
        self._rows = rows
        self._masks = masks
        self._drawing = drawing

    def sample(
        self,
        logits: Array,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        draws: DrawParameters | None = None,
    ) -> tuple[Array, list[TokenLogprobs | None] | None]:
        """logits [R, V] fp32 (changed in place) of rows [R] → tokens [R] int64, log-probabilities.

        places [R] is where each new token will stand in its sequence. Log-probabilities are of the
        raw logits; None where a row did not ask, or as a whole where none did. `draws`: what
        `Rows.draws` has for these rows, where it is on the device already.
        """
        columns = self._rows.columns[rows]
        asked = np.flatnonzero(columns["logprobs"] >= 0)
        raw = logits[like(asked, logits)] if len(asked) else None
        for mask in self._masks:
            mask.apply(logits, rows)
        self._mask_stops(logits, rows, places, columns)
        self._bias(logits, rows)
        self._penalise(logits, rows, places, columns)
        tokens = self.choose(logits, rows, places, draws)
        if raw is None:
            return tokens, None
        top = columns["logprobs"][asked]
        found = log_probabilities(raw, tokens[like(asked, logits)], top)
        result: list[TokenLogprobs | None] = [None] * len(rows)
        for place, logprobs in zip(asked, found, strict=True):
            result[place] = logprobs
        return tokens, result

    def choose(
        self,
        logits: Array,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        draws: DrawParameters | None = None,
    ) -> Array:
        """The tokens of `sample`, of logits that nothing is done to any more."""
        if draws is not None:
            return self._drawing.draw(logits, draws)
        rules = self._rows.rules(rows)
        if rules is None:
            return self._drawing.argmax(logits)
        return by_rules(self._drawing, logits, rules, places)

    def _mask_stops(
        self,
        logits: Array,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        columns: npt.NDArray[np.void],
    ) -> None:
        """Ids that end a sequence are out of reach until it has `min_tokens`."""
        early = np.flatnonzero(places - columns["prompt_length"] < columns["min_tokens"])
        pairs = [(place, token) for place in early for token in self._rows.stop_ids[rows[place]]]
        if not pairs:
            return
        index = like(np.asarray(pairs, np.int64), logits)
        kept = logits[index[:, 0], index[:, 1]] if self._masks else None
        logits[index[:, 0], index[:, 1]] = float("-inf")
        if kept is not None:
            # Where a mask left nothing but an end, the sequence ends early.
            empty = (logits[index[:, 0]] == float("-inf")).all(-1)
            logits[index[empty, 0], index[empty, 1]] = kept[empty]

    def _bias(self, logits: Array, rows: npt.NDArray[np.int64]) -> None:
        biases = [
            (place, token, bias)
            for place, row in enumerate(rows)
            for token, bias in self._rows.logit_bias[row].items()
        ]
        if biases:
            places, tokens, values = zip(*biases, strict=True)
            index = (
                like(np.asarray(places, np.int64), logits),
                like(np.asarray(tokens, np.int64), logits),
            )
            logits[index] += like(np.asarray(values, np.float32), logits)

    def _penalise(
        self,
        logits: Array,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        columns: npt.NDArray[np.void],
    ) -> None:
        # Counted from the row's tokens each time: no state that a preemption could spoil.
        some = np.flatnonzero(columns["penalised"])
        if not len(some):
            return
        chosen, lengths = columns[some], places[some]
        width = int(lengths.max())
        if isinstance(logits, np.ndarray):
            host_sampling.penalise_rows(
                logits,
                some,
                self._rows.host_tokens[rows[some], :width],
                chosen["prompt_length"],
                lengths,
                chosen["repetition"],
                chosen["frequency"],
                chosen["presence"],
            )
            return
        from ..kernels import sampling

        index = like(some, logits)
        table = tensor(self._rows.tokens)[like(rows[some], logits), :width]
        logits[index] = sampling.penalise(
            logits[index],
            table,
            _column(chosen["prompt_length"], logits),
            _column(lengths, logits),
            _column(chosen["repetition"], logits),
            _column(chosen["frequency"], logits),
            _column(chosen["presence"], logits),
        )


def log_probabilities(
    logits: Array, tokens: Array, top: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Of tokens [R] by raw logits [R, V], with the top[r] most likely of each row."""
    most = min(int(top.max()), logits.shape[1])
    if isinstance(logits, np.ndarray):
        found = host_sampling.log_probabilities(logits, tokens, most)
    else:
        from ..kernels import sampling

        found = sampling.log_probabilities(logits, tokens, most)
    return [
        TokenLogprobs(logprob, rank, ids[:count], values[:count])
        for logprob, rank, ids, values, count in zip(
            found.logprobs, found.ranks, found.top_ids, found.top_logprobs, top, strict=True
        )
    ]


def _column(values: npt.NDArray[np.generic], logits: Array) -> Array:
    # A copy, since a field of a single row counts as contiguous whatever its stride.
    return like(values.copy(), logits)
