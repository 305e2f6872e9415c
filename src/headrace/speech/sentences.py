"""Division of texts into pieces to speak: sentences, and clauses of long ones."""

from __future__ import annotations

import re

MOST = 300
"""Characters of a piece."""
FIRST = 48
"""Characters of the first sentence above which its first clause is a separate piece, so that its
sound comes sooner."""
LEAST = 12
"""Characters of such a clause."""
_CLOSING = "\"'”’»)\\]」』）"
# A run of marks or spaces is tried from its first character only: otherwise cost is quadratic.
_END = re.compile(
    rf"(?:(?<![.!?…])[.!?…]+[{_CLOSING}]*(?=\s|$)|[。！？]+[{_CLOSING}]*)\s*|(?<!\s)\s*\n\s*"
)
_CLAUSE = re.compile(
    rf"(?:(?<![.,;:!?…])[.,;:!?…]+[{_CLOSING}]*(?=\s|$)|[、，；：。！？]+[{_CLOSING}]*|—|\s[–-]\s)\s*"
)
_ABBREVIATED = re.compile(
    r"(?<![\w.])(?:[A-Z]|[Dd]r|Mrs?|Ms|Prof|St|No|vs|etc|e\.g|i\.e|approx|bzw|z\.B|Nr)\.$"
)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text in order, without spaces around them.

    A period after a letter or a usual abbreviation, or before a small letter, does not end one.
    """
    found, begin = [], 0
    for end in _END.finditer(text):
        mark, rest = end[0].strip(), text[end.end() : end.end() + 1]
        if mark[:1] == "." and (rest.islower() or _abbreviates(text, begin, end.start())):
            continue
        found.append(text[begin : end.end()].strip())
        begin = end.end()
    found.append(text[begin:].strip())
    return [one for one in found if one]


def _abbreviates(text: str, begin: int, period: int) -> bool:
    return _ABBREVIATED.search(text, max(begin, period - 12), period + 1) is not None


def clauses(text: str) -> list[tuple[str, str]]:
    """Return (clause, mark after it) in order; a mark is one of `,.;:!?` or empty."""
    found, begin = [], 0
    for end in _CLAUSE.finditer(text):
        if end[0][0] == "." and end.end() < len(text) and _abbreviates(text, begin, end.start()):
            continue
        if clause := text[begin : end.end()].strip():
            found.append((clause, _MARKS.get(end[0].strip()[:1], ",")))
        begin = end.end()
    if rest := text[begin:].strip():
        found.append((rest, ""))
    return found


_MARKS = dict(zip(".;:!?…。；：！？", ".;:!?..;:!?", strict=True))
"""Marks by their first character; all others are commas."""


def cut(text: str, most: int) -> list[str]:
    """Cut a text into pieces of at most `most` characters: after the last mark that fits, else at
    the last space, else anywhere."""
    found = []
    while len(text) > most:
        head = text[: most + 1]
        ends = [end.end() for end in _CLAUSE.finditer(head) if most // 4 <= end.end() <= most]
        space = max(head.rfind(" "), head.rfind("\u3000"))
        at = ends[-1] if ends else space if space >= most // 4 else most
        found.append(text[:at].strip())
        text = text[at:].strip()
    return [one for one in (*found, text) if one]


def pieces(text: str) -> list[str]:
    """Return the pieces to speak one at a time: sentences, or parts of long ones."""
    found = [piece for sentence in sentences(text) for piece in cut(sentence, MOST)]
    if not found or len(found[0]) <= FIRST:
        return found
    ends = (end.end() for end in _CLAUSE.finditer(found[0]))
    first = next((end for end in ends if LEAST <= end < len(found[0])), None)
    if first is None or first > MOST // 2:
        return found
    return [found[0][:first].strip(), found[0][first:].strip(), *found[1:]]
