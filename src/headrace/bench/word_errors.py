"""How much of what was said was heard otherwise: word and character error rates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_WORD = re.compile(r"[\w']+")


class Errors(NamedTuple):
    """Words (or characters) that were said, and the fewest changes that give what was heard."""

    said: int
    wrong: int

    @property
    def rate(self) -> float:
        return self.wrong / max(1, self.said)


def words(text: str) -> list[str]:
    """Runs of letters, digits and apostrophes, in lower case. Numbers stay as they are written."""
    return _WORD.findall(text.casefold())


def errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """The fewest to change, take out or put in (Levenshtein 1966), a row of the table at a time.

    Within a row, putting in depends on the place before: best[j] = min over k <= j of
    found[k] + (j - k), which is a running minimum of found - place.
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
    """Letters and digits alone, by which languages are compared that put no space between words."""
    wanted = "".join(words(said))
    return Errors(len(wanted), errors(wanted, "".join(words(heard))))
