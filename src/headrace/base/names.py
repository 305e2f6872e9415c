"""Mistaken option names: the nearest of ours, or ours for a name of another engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

from .errors import HeadraceError
from .other_engines import ENGINES, FURTHER

Record = TypeVar("Record")


def plain(name: str) -> str:
    """Return an option's name without dashes, as a keyword."""
    return name.lstrip("-").replace("-", "_")


FOREIGN = {
    plain(theirs): word
    for words in (FURTHER, *ENGINES.values())
    for word in words
    for theirs in word.names
    if len(plain(theirs)) > 1 and plain(theirs) != word.ours
}
"""Option of another engine as a keyword → its row. A later engine's row stands for all."""


def hint(name: str, known: Collection[str], spell: Callable[[str], str] = str) -> str:
    """Return the addition to a message about an unknown name: "; …", or "".

    `spell` writes one of ours as the user would: a flag, a keyword.
    """
    keyword = plain(name[:100])
    word = FOREIGN.get(keyword)
    if word is not None and word.ours in known:
        more = word.example or (word.note if word.turn != "request" else "")
        return f"; here that is {spell(word.ours)}{more and f' ({more})'}"
    if word is not None and not word.ours and "max_context" in known:
        return f"; there is no such option here: {word.note}"
    return nearest(keyword, known, spell)


def nearest(name: str, known: Collection[str], spell: Callable[[str], str] = str) -> str:
    """Return the most similar known name: "; did you mean …?", or ""."""
    import difflib  # Local: only mistakes need it.

    near = difflib.get_close_matches(name[:200], known, n=1, cutoff=0.75)
    return f"; did you mean {spell(near[0])}?" if near else ""


def hinted(error: type[HeadraceError]) -> Callable[[type[Record]], type[Record]]:
    """Make a record raise `error` with a hint for an unknown keyword, not a bare `TypeError`."""

    def decorate(kind: type[Record]) -> type[Record]:
        made: Any = kind.__init__
        known = [spec.name for spec in fields(kind)]  # type: ignore[arg-type]

        @wraps(made)
        def init(self: Record, *given: Any, **named: Any) -> None:
            try:
                made(self, *given, **named)
            except TypeError:
                for name in named:
                    if name not in known:
                        words = f"{kind.__name__} has no {name[:100]}{hint(name, known)}"
                        raise error(words, param=name[:100]) from None
                raise

        kind.__init__ = init  # type: ignore[method-assign, assignment]
        return kind

    return decorate
