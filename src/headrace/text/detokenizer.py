"""Token ids to text while they arrive: never half a character, and no text is taken back.

Bytes of the tokens go through an incremental UTF-8 decoder. It holds back at most three bytes, the
beginning of one character. So a token costs the same anywhere in a long text, and the parts always
add up to the whole.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Protocol

from .pieces import PieceKind


class _Vocabulary(Protocol):
    @property
    def kind(self) -> PieceKind: ...
    @property
    def strip_space(self) -> bool: ...


class Pieces(Protocol):
    """Interface to the needed part of a `Tokenizer`."""

    @property
    def vocabulary(self) -> _Vocabulary: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def piece(self, token_id: int, /) -> bytes: ...


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace each undecodable byte with one U+FFFD, as SentencePiece does."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd", error.start + 1


codecs.register_error("headrace.each_byte", _each_byte)


class IncrementalDetokenizer:
    """Decoder of a growing sequence of ids.

    `skip_special` leaves control tokens out, except for those in `keep` (a dialect's markers).
    `at_start`: the ids begin a text, so a leading space that only encoding put there is dropped.
    (Ids that follow a prompt do not begin a text.)
    """

    __slots__ = ("_decode", "_piece", "_skip", "_strip")

    def __init__(
        self,
        tokenizer: Pieces,
        *,
        skip_special: bool = True,
        keep: frozenset[int] = frozenset(),
        at_start: bool = False,
    ) -> None:
        vocabulary = tokenizer.vocabulary
        per_byte = vocabulary.kind == "sentencepiece"
        errors = "headrace.each_byte" if per_byte else "replace"
        decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._decode: Callable[..., str] = decoder.decode
        self._piece: Callable[[int], bytes] = tokenizer.piece
        self._skip = tokenizer.special_ids - keep if skip_special else frozenset()
        self._strip = at_start and vocabulary.strip_space

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that these further ids make certain; it may be empty."""
        skip, piece = self._skip, self._piece
        data = b"".join([piece(index) for index in ids if index not in skip])
        return self._clean(self._decode(data)) if data else ""

    def finish(self) -> str:
        """Return the held-back text at the end of the sequence: U+FFFD for half a character."""
        return self._clean(self._decode(b"", True))

    def _clean(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
