"""Long texts in segments, cut where the tokens of one side do not depend on the other.

Encoders need many times the memory of their text while they work (the `tokenizers` library 100 to
200 bytes per byte), and can only say at the end how many tokens it has. So a long text is encoded
in segments, one after the other, as far as it has to be.

A cut is between a small letter and a space before a small letter. Every pattern that cuts text into
words has a border there, whatever stands around it; where there is no pattern, no merge reaches
over it unless a token does. What a vocabulary or its normaliser might still do differently is tried
once, with a text that is cut at each such place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

SEGMENT = 16 * 1024
"""Characters of a segment, and a word more."""
_BORDER = re.compile("[a-z](?= [a-z])")
_CROSSED = re.compile("[a-z][ \u2581\u0120]")
"""In a token as files write it: a space is itself, U+2581 (SentencePiece) or U+0120 (bytes)."""
_TRIED = (
    "The headrace carries water to the turbine, and  the   turbine turns it into work.\n"
    "don't we're it's i'll 1 cubic metre a second 12345 x 2 = y\n\n\tdef f(a: int) -> int:\n"
    "    return a if b else c  # na\u00efve \u6c34 caf\u00e9 \U0001f642 ok (see below) for more\n"
)


def segments(text: str, size: int = SEGMENT) -> Iterator[str]:
    """The text in pieces of at least `size` characters that end at a cut; the last one is what is
    left."""
    start = 0
    while (border := _BORDER.search(text, start + size)) is not None:
        yield text[start : border.end()]
        start = border.end()
    yield text[start:]


def may_be_cut(
    encode: Callable[[str], list[int]], tokens: Iterable[str], added: Iterable[str]
) -> bool:
    """Do the segments of any text have the tokens that they have in it? `tokens`: all, as files
    write them; `added`: those that are found in text as a whole."""
    # An added token that ends in a letter may take the space after it.
    if any(token[-1:].islower() for token in added) or any(map(_CROSSED.search, tokens)):
        return False
    whole = encode(_TRIED)
    return all(
        encode(_TRIED[: border.end()]) + encode(_TRIED[border.end() :]) == whole
        for border in _BORDER.finditer(_TRIED)
    )
