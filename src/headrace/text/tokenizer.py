"""Text to token ids and back: one interface to the vocabularies of model files."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.base.config import Decision
from headrace.base.errors import InvalidRequest, TooLarge

from .detokenizer import IncrementalDetokenizer
from .pieces import PIECE_READERS, SPACE, PieceKind, sentencepiece_piece
from .segments import SEGMENT, Borders, borders_of, segments
from .specials import SpecialSplitter

MAX_CHARACTERS = 8 * 2**20
"""Longest text that is tokenised; a longer one is refused before any work."""
_LOOK = 64 * 1024
"""Characters that are checked at once."""
_PART = 4096
"""Ids that are decoded at once."""


class Encoder(Protocol):
    """Encoder of plain text, without special tokens, to ids."""

    def encode(self, text: str) -> list[int]: ...


class SpecialEncoder(Protocol):
    """Encoder of text with its special tokens to ids."""

    def encode_with_specials(self, text: str, *, special: bool) -> list[int]: ...


@dataclass(slots=True)
class Vocabulary:
    """Tokens of a model and their properties, as read from its file."""

    kind: PieceKind
    tokens: Sequence[str]
    """Text of each id, as the file writes it."""
    added: Mapping[str, int]
    """Tokens that are found in text as a whole, special or not: text → id."""
    special_ids: frozenset[int]
    """Ids that are not text: control tokens; left out when special tokens are skipped."""
    find: Callable[[str], int | None]
    """Function from a token as the file writes it to its id."""
    bos_id: int | None = None
    eos_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    """Ids that the model wants before a text without a template (bos, [CLS])."""
    suffix_ids: tuple[int, ...] = ()
    strip_space: bool = False
    """SentencePiece: encoding puts a space before a text; decoding drops it again."""
    rows: int | None = None
    """Rows of the model's matrices, if known: a token without one is not the model's."""
    added_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        if self.rows is not None:
            find = self.find
            self.find = lambda token: self._row(find(token))
            self.added = {text: index for text, index in self.added.items() if index < self.count}
            self.special_ids = frozenset(index for index in self.special_ids if index < self.count)
            self.bos_id, self.eos_id = self._row(self.bos_id), self._row(self.eos_id)
        self.added_ids = frozenset(self.added.values())

    @property
    def count(self) -> int:
        """Return the number of the model's tokens, whose ids are below it."""
        return len(self.tokens) if self.rows is None else min(len(self.tokens), self.rows)

    def _row(self, index: int | None) -> int | None:
        return index if index is not None and index < self.count else None


class Tokenizer:
    """Converter of text ↔ ids. Made by `load_tokenizer`; safe to share between threads."""

    def __init__(
        self, vocabulary: Vocabulary, encoder: Encoder | SpecialEncoder, served: Decision
    ) -> None:
        self._vocabulary = vocabulary
        self.served = served
        """Implementation that turns text into ids, and why; for `headrace explain`."""
        self._encoder = encoder
        self._large = threading.Lock()
        """Lock for segments that cannot be cut: they are encoded one at a time, for their
        memory."""
        self._pieces: list[bytes | None] = [None] * len(vocabulary.tokens)
        if hasattr(encoder, "encode_with_specials"):
            self._encode = encoder.encode_with_specials
        else:
            self._plain = encoder.encode
            control: dict[str, int] = {}
            user: dict[str, int] = {}
            for token, index in vocabulary.added.items():
                (control if index in vocabulary.special_ids else user)[token] = index
            self._user = SpecialSplitter(user)
            self._control = SpecialSplitter(control)
            self._all = SpecialSplitter(vocabulary.added)
            self._encode = self._encode_split

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """Return the bound of ids, which are from 0; a model may have more rows."""
        return self.vocabulary.count

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def eos_id(self) -> int | None:
        return self.vocabulary.eos_id

    @property
    def add_bos(self) -> bool:
        """Return whether the model wants a prefix (bos) before raw text, as its authors set it."""
        return bool(self.vocabulary.prefix_ids)

    @property
    def special_ids(self) -> frozenset[int]:
        return self.vocabulary.special_ids

    @property
    def special_tokens(self) -> dict[str, int]:
        """Return the control tokens that can be found in text, text → id."""
        special = self.vocabulary.special_ids
        added = self.vocabulary.added
        return {token: index for token, index in added.items() if index in special}

    def token_to_id(self, token: str) -> int | None:
        return self.vocabulary.find(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as the file writes it."""
        tokens = self.vocabulary.tokens
        return tokens[token_id] if 0 <= token_id < len(tokens) else None

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        add_bos: bool = False,
        most: int | None = None,
        unbroken: int | None = None,
    ) -> list[int]:
        """Encode a text to ids.

        `special`: control tokens spelled out in the text are taken as such (as in a rendered
        template), otherwise as plain text. `add_bos`: put the model's prefix before it, if the
        model wants one. `most`: encoding of a longer text may stop soon after this number of ids.
        Raises `InvalidRequest` for invalid Unicode (a lone surrogate) and `TooLarge` above
        `MAX_CHARACTERS`.
        """
        if not isinstance(text, str):
            raise InvalidRequest(
                f"text must be a string, not {type(text).__name__}", param="prompt"
            )
        if len(text) > MAX_CHARACTERS:
            raise TooLarge(
                f"the text has {len(text)} characters; at most {MAX_CHARACTERS} are allowed",
                param="prompt",
            )
        for start in range(0, len(text), _LOOK):  # In parts, since it makes a copy.
            try:
                text[start : start + _LOOK].encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    "the text is not valid Unicode: a lone surrogate at character "
                    f"{start + error.start}",
                    param="prompt",
                ) from None
        before = self.vocabulary.prefix_ids if add_bos else ()
        if len(text) <= 2 * SEGMENT:
            return [*before, *self._encode(text, special=special)]
        borders = self._borders
        if not special:
            borders = Borders(borders.left_out)  # A control token is text like any other.
        if unbroken is not None and not borders:
            unbroken *= 4
        ids = list(before)
        shared = self._shared
        for segment in segments(text, borders, unbroken=unbroken):
            large = len(segment) > 2 * SEGMENT
            with self._large if large else contextlib.nullcontext():
                found = self._encode(segment, special=special)
            ids += [shared[index] for index in found]  # One object for all places of an id.
            if most is not None and len(ids) > most:
                break
        return ids

    @functools.cached_property
    def _borders(self) -> Borders:
        return borders_of(
            lambda text: self._encode(text, special=True),
            self.vocabulary.tokens,
            self.vocabulary.added,
            self.special_tokens,
        )

    @functools.cached_property
    def _shared(self) -> list[int]:
        return list(range(len(self.vocabulary.tokens)))

    def fewest(self, text: str) -> int:
        """Return a lower bound of a text's ids, without encoding it: one hostile word of megabytes
        takes many seconds. 0 if the encoder cannot tell."""
        longest: int | None = getattr(self._encoder, "longest", None)
        if longest is None:
            return 0
        whole = max((len(token.encode()) for token in self.vocabulary.added), default=0)
        return len(text.encode(errors="replace")) // max(longest, whole)

    def encode_with_specials(self, text: str, *, limit: int | None = None) -> list[int]:
        """Encode a text for an embedding model: with the ids before and after it.

        `limit`: the text is cut at its end so that the result has at most `limit` ids.
        """
        before, after = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
        room = None if limit is None else _room(limit, len(before) + len(after))
        return [*before, *self.encode(text, most=room)[:room], *after]

    def encode_pair(
        self, first: str, second: str, *, limit: int | None = None
    ) -> tuple[list[int], int]:
        """Return (ids of two texts for a model that scores pairs, where the second begins).

        `limit`: the second text is cut at its end so that both have at most `limit` ids.
        """
        before, after = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
        head = [*before, *self.encode(first), *after]
        room = None if limit is None else _room(limit, len(head) + len(after))
        return [*head, *self.encode(second, most=room)[:room], *after], len(head)

    def _encode_split(self, text: str, *, special: bool) -> list[int]:
        if self.vocabulary.kind == "sentencepiece":
            # Its space is "▁" in special tokens too: a run of spaces may be one of them.
            text = text.replace(" ", SPACE)
        if not self.vocabulary.strip_space:
            return self._encode_parts((self._all if special else self._user).split(text))
        # The space before a text may join spaces of the text to one token. So it is added before
        # tokens are looked for, and again after each control token.
        ids: list[int] = []
        for part in self._control.split(text) if special else [text]:
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += self._encode_parts(self._user.split(SPACE + part))
        return ids

    def _encode_parts(self, parts: Iterable[str | int]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._plain(part)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode ids from the start of a text; bytes that are not UTF-8 become U+FFFD."""
        stream = IncrementalDetokenizer(self, skip_special=skip_special, at_start=True)
        # In parts: joining takes eighty bytes for each of the pieces.
        parts = [stream.feed(ids[at : at + _PART]) for at in range(0, len(ids), _PART)]
        return "".join(parts) + stream.finish()

    def piece(self, token_id: int) -> bytes:
        """Return the raw bytes of a token, maybe a part of a character; empty for an id without a
        token."""
        if not 0 <= token_id < len(self._pieces):
            return b""
        known = self._pieces[token_id]
        if known is None:
            token = self.vocabulary.tokens[token_id]
            if token_id in self.vocabulary.added_ids:
                spaced = self.vocabulary.kind == "sentencepiece"
                known = sentencepiece_piece(token) if spaced else token.encode("utf-8", "replace")
            else:
                known = PIECE_READERS[self.vocabulary.kind](token)
            self._pieces[token_id] = known
        return known


def _room(limit: int, taken: int) -> int:
    """Return the room for a text that may be cut, if other ids take part of `limit`."""
    if taken >= limit:
        raise InvalidRequest(
            f"a cut to {limit} tokens leaves no room: {taken} are taken by what is not cut",
            param="truncate_prompt_tokens",
        )
    return limit - taken
