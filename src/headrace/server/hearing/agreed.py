"""Words of a growing transcript that can be shown for good.

Local agreement (Liu et al. 2020; Macháček et al. 2023): words stay if two passes over a growing
sound agree on them, counted from its beginning. Whole words are compared, without case and
punctuation.
"""

from __future__ import annotations


class Agreed:
    """Words of one utterance."""

    def __init__(self) -> None:
        self._before: list[str] = []
        self.shown: list[str] = []
        """Words already returned."""

    def more(self, text: str) -> tuple[str, str]:
        """Add a pass; return (newly certain text, the guess that follows it)."""
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
        """Add the final text; return (its text after the shown words, count of shown words it
        lacks).

        If it contradicts a shown word, the first is empty.
        """
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
    """Normalise a word: without case and punctuation, which a second pass may write differently."""
    return "".join(letter for letter in word.casefold() if letter.isalnum())
