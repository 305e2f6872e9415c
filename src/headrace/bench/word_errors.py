"""Transcription errors: word and character error rates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_WORD = re.compile(r"[\w']+")


class Errors(NamedTuple):
    """Words (or characters) of the truth, and the fewest edits from it to the transcript."""

    said: int
    wrong: int

    @property
    def rate(self) -> float:
        return self.wrong / max(1, self.said)


def words(text: str) -> list[str]:
    """Return runs of letters, digits and apostrophes, in lower case. Numbers stay as written."""
    return _WORD.findall(text.casefold())


def errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Count the fewest substitutions, deletions, insertions (Levenshtein 1966), a table row at a
    time.

    Within a row, an insertion depends on the previous place: best[j] = min over k <= j of found[k]
    + (j - k), which is a running minimum of found - place.
    """
    numbers = {each: number for number, each in enumerate({*said, *heard})}
    other = np.array([numbers[each] for each in heard], np.int64)
    places = np.arange(len(heard) + 1)
    row = places.copy()
    for count, each in enumerate(said, 1):
        found = np.empty_like(row)
        found[0] = count
        found[1:] = np.minimum(row[1:] + 1, row[:-1] + (other != numbers[each]))
        row = np.minimum.accumulate(found - places) + places
    return int(row[-1])


def word_errors(said: str, heard: str) -> Errors:
    wanted = words(said)
    return Errors(len(wanted), errors(wanted, words(heard)))


def character_errors(said: str, heard: str) -> Errors:
    """Compare only letters and digits: for languages without spaces between words."""
    wanted = "".join(words(said))
    return Errors(len(wanted), errors(wanted, "".join(words(heard))))
