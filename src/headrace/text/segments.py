"""Long texts in segments, cut where the tokens of one side do not depend on the other.

Encoders need many times the memory of their text while they work: the `tokenizers` library 100 to
200 bytes per byte. They report the number of tokens only at the end. So a long text is encoded in
segments, one after the other, as far as necessary.

A cut is between a small letter and a space before a small letter. Every pattern that cuts text into
words has a border there, whatever the surrounding text. Without a pattern, no merge reaches over it
unless a token does. Another cut is before a control token, which stands for itself. Remaining
differences of a vocabulary or its normaliser are tested once, with texts that are cut at each such
place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from headrace.base.errors import TooLarge

from .pieces import SPACE
from .specials import SpecialSplitter

SEGMENT = 16 * 1024
"""Characters of a segment, up to the end of a word."""
_BORDER = re.compile("[a-z](?= [a-z])")
_CROSSED = re.compile("[a-z][ \u2581\u0120]")
"""Pattern of a cut inside a token as files write it: a space is itself, U+2581 (SentencePiece) or
U+0120 (bytes)."""
_TRIED = (
    "The headrace carries water to the turbine, and  the   turbine turns it into work.\n"
    "don't we're it's i'll 1 cubic metre a second 12345 x 2 = y\n\n\tdef f(a: int) -> int:\n"
    "    return a if b else c  # na\u00efve \u6c34 caf\u00e9 \U0001f642 ok (see below) for more\n"
)
_BEFORE = ("The water", "f(x).", "caf\u00e9", "\u6c34", "12", "it's", "->")
_AFTER = ("user\nThe", " work", "\n\n", "\u6c34", "")
_TRIED_MARKS = 4


@dataclass(frozen=True, slots=True)
class Borders:
    """Places where texts of one vocabulary may be cut."""

    left_out: int | None = None
    """Number of characters after a cut before a space that belong to no segment. It is 1 for an
    encoder that puts a space before each text, also before the segment. None: there is no such
    cut."""
    marks: SpecialSplitter | None = None
    """Control tokens before which a text may be cut."""

    def __bool__(self) -> bool:
        return self.left_out is not None or self.marks is not None

    def between(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        """Find the first cut in a part of a text; return (end of the text before it, start of the
        rest)."""
        if self.left_out is not None:
            border = _BORDER.search(text, start, end + 2)
            if border is not None:
                return border.end(), border.end() + self.left_out
        if self.marks is not None:
            for place in self.marks.places(text, start, end):
                if not text[place - 1].isspace():  # A token may take the space before it.
                    return place, place
        return None


def segments(
    text: str, borders: Borders, size: int = SEGMENT, unbroken: int | None = None
) -> Iterator[str]:
    """Yield the text in pieces of at least `size` characters that end at a cut, and then the rest.
    Raises `TooLarge` if more than `unbroken` characters follow without a cut."""
    start = 0
    while True:
        found, looked = None, start + size
        while found is None and looked < len(text):
            found = borders.between(text, looked, looked + size)
            looked += size
            if found is None and unbroken is not None and looked - start > size + unbroken:
                raise TooLarge(
                    f"the text has more than {unbroken} characters in a row without a space "
                    "between two small letters; that much is not tokenised at once",
                    param="prompt",
                )
        if found is None:
            yield text[start:]
            return
        yield text[start : found[0]]
        start = found[1]


def borders_of(
    encode: Callable[[str], list[int]],
    tokens: Iterable[str],
    added: Collection[str],
    control: Iterable[str],
) -> Borders:
    """Find the cuts that leave the tokens of any text unchanged.

    `tokens`: all, as files write them; `added`: those that are found in text as a whole; `control`:
    those of them that stand for themselves.
    """
    return Borders(_left_out(encode, tokens, added), _marks(encode, added, control))


def _left_out(
    encode: Callable[[str], list[int]], tokens: Iterable[str], added: Collection[str]
) -> int | None:
    # An added token that ends in a letter may take the space after it.
    if any(token[-1:].islower() for token in added) or any(map(_CROSSED.search, tokens)):
        return None
    whole = encode(_TRIED)
    ends = [border.end() for border in _BORDER.finditer(_TRIED)]
    for skip in (0, 1):
        if all(encode(_TRIED[:end]) + encode(_TRIED[end + skip :]) == whole for end in ends):
            return skip
    return None


def _marks(
    encode: Callable[[str], list[int]], added: Collection[str], control: Iterable[str]
) -> SpecialSplitter | None:
    # Where one begins no other added token may be in progress.
    inside = {letter for token in added for letter in token[1:]}
    marks = [
        mark
        for mark in control
        if len(mark) > 2
        and mark[0] not in inside
        and not mark[0].isalnum()
        and not any(letter.isspace() or letter == SPACE for letter in mark)
    ]
    tried = marks[:: max(1, len(marks) // _TRIED_MARKS)]
    same = all(
        encode(before + mark + after) == encode(before) + encode(mark + after)
        for mark in tried
        for before in _BEFORE
        for after in _AFTER
    )
    return SpecialSplitter(dict.fromkeys(marks, 0)) if marks and same else None
