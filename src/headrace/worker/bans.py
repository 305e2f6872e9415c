"""Features that forbid tokens: those outside a list, and the last tokens of unwanted words.

Their meaning is vLLM's (`allowed_token_ids`, `bad_words`). Logits are numpy arrays or tensors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..base.step import Admission
from ..kernels.arrays import Array, tensor
from ..kernels.program import LOGITS
from .arrays import like
from .features import Indices, RowWish
from .rows import Rows

FORBIDDEN = float("-inf")


class AllowedTokens(RowWish[npt.NDArray[np.int64]]):
    """A row's list of the only ids that it may draw. With a grammar no id might be left, so
    `engine.clients.input` admits no row that has both."""

    want = LOGITS

    def wish(self, admission: Admission) -> npt.NDArray[np.int64] | None:
        ids = admission.spec.sampling.allowed_token_ids
        return None if ids is None else np.unique(np.asarray(ids, np.int64))

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        for index, row in enumerate(rows.tolist()):
            ids = self._rows.get(row)
            if ids is None:
                continue
            at = like(ids, logits)
            kept = logits[index, at]
            logits[index] = FORBIDDEN
            logits[index, at] = kept


class _Words:
    """The unwanted words of one row as arrays of W words with at most P ids before the last."""

    def __init__(self, words: tuple[tuple[int, ...], ...], prompt: int) -> None:
        longest = max(len(word) for word in words) - 1
        self.before = np.full((len(words), longest), -1, np.int32)
        """Ids before the last [W, P], right-aligned; -1: any id."""
        for place, word in enumerate(words):
            if len(word) > 1:
                self.before[place, longest - len(word) + 1 :] = word[:-1]
        self.last = np.array([word[-1] for word in words], np.int64)
        self.from_place = np.array([prompt + len(word) - 1 for word in words], np.int64)
        """First place [W] at which a word that lies wholly in the answer can end."""


class BadWords(RowWish[_Words]):
    """A row's unwanted words, each prevented by forbidding its last id.

    The id is forbidden if the ids before it are the answer's last. If earlier masks leave nothing
    else (a grammar, a list of ids, the end of reasoning), the word is written: a form is promised,
    a word only unwanted.
    """

    want = LOGITS

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._table = rows

    def wish(self, admission: Admission) -> _Words | None:
        words = admission.spec.bad_words
        return _Words(words, admission.prompt_length) if words else None

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        for index, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
            words = self._rows.get(row)
            if words is None:
                continue
            reached = words.from_place <= place
            before, last = words.before[reached], like(words.last[reached], logits)
            width = min(before.shape[1], place)
            if width:
                # Compared on the logits' device, since the host may not have the newest tokens yet.
                wanted = like(before[:, before.shape[1] - width :], logits)
                past = self._past(row, place - width, place, logits)
                last = last[((wanted == past) | (wanted < 0)).all(-1)]
            if not len(last):
                continue
            kept = logits[index, last]
            logits[index, last] = FORBIDDEN
            if bool((logits[index] == FORBIDDEN).all()):
                logits[index, last] = kept

    def _past(self, row: int, first: int, end: int, logits: Array) -> Array:
        """Return the ids of a row at these places, on the logits' device."""
        if isinstance(logits, np.ndarray):
            return self._table.host_tokens[row, first:end]
        return tensor(self._table.tokens)[row, first:end]
