"""Which words of a text that still grows can be shown for good.

Local agreement (Liu et al. 2020; Macháček et al. 2023): what two passes over a growing sound say
alike, from its begin on, stays. Only whole words count, and neither case nor punctuation.
"""

from __future__ import annotations


class Agreed:
    """The words of one utterance."""

    def __init__(self) -> None:
        self._before: list[str] = []
        self.shown: list[str] = []
        """Words that were given out."""

    def more(self, text: str) -> tuple[str, str]:
        """(what is certain by now and was not yet given out, what is a guess behind it)."""
        words = text.split()
        same = 0
        for one, other in zip(self._before, words, strict=False):
            if plain(one) != plain(other):
                break
            same += 1
        self._before = words
        fresh = words[len(self.shown) : same]
        return self._give(fresh), " ".join(words[max(same, len(self.shown)) :])

    def end(self, text: str) -> tuple[str, int]:
        """(what the final text has behind all that was given out, how many of those words it does
        not have). Where it has other words there is nothing to go on from."""
        words = text.split()
        wrong = sum(
            plain(one) != plain(other) for one, other in zip(self.shown, words, strict=False)
        ) + max(0, len(self.shown) - len(words))
        return ("" if wrong else self._give(words[len(self.shown) :])), wrong

    def _give(self, fresh: list[str]) -> str:
        space = " " if self.shown and fresh else ""
        self.shown += fresh
        return space + " ".join(fresh)


def plain(word: str) -> str:
    """A word without what a second pass may write differently."""
    return "".join(letter for letter in word.casefold() if letter.isalnum())
